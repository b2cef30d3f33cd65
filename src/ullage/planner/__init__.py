"""What a run needs of GPU, host and disk, predicted before it starts and without torch."""
