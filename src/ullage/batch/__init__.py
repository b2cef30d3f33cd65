"""The typed stages of a step (Rollouts -> Experience -> TrainBatch) and their division into micro-batches."""
