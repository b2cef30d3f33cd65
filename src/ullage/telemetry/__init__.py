"""What a run writes, reads and shows: its folder, metrics, timings, memory peaks, terminal view and sinks. No torch."""
