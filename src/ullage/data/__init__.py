"""Prompts for training and evaluation: reading rows, finding columns, chat templates, and the order of training.

`load_prompts` (prompts.py) is the door; a `PromptSampler` (sampler.py) draws from what it returns. Nothing here imports
torch.
"""
