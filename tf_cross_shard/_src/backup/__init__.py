"""BackupAndRestore: resuming `fit` after a crash or a preemption."""
