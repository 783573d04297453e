"""Text in and out: the tokenizer, the chat template and its probe, detokenising, stop strings, thoughts. No torch."""
