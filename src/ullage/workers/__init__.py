"""The roles of a run: actor, critic, reference (later reward model), each around a language model."""
