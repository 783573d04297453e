"""Text processing: tokenizer, chat template and its probe, detokenisation, stop strings, thoughts. Torch-free."""
