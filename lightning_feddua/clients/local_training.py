class LocalTraining:
    """What a client does in a round: here, steps of the module's own optimizer and nothing else."""
