"""The embedded engine: continuous batching over slots, a paged KV arena, the trainer's own weights."""
