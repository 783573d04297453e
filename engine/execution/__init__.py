"""The data plane: a SchedulerOutput becomes tensors, a forward pass and a ModelRunnerOutput."""
