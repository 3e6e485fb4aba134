"""The stages of one optimizer step, in the order of `flow.Step.perform`."""
