"""The stages of a step, in the order of `flow.StepPipeline.perform`."""
