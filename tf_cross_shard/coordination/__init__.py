"""What several machines do together, below the strategies that use it."""
