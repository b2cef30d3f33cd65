"""What every room may use: errors with exit codes, extension lookup, units, and the communicator protocol."""
