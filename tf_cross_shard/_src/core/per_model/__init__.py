"""Numbers that differ between models: learning rates and settings."""
