"""From the coordinates of a checkpoint to the memory of an engine: what the rooms of vLLM and SGLang share."""
