"""The roles of a run: actor, reference (later critic and reward model), each around a language model."""
