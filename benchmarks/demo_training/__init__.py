"""How the packaged model is made: its texts, its tokenizer and its training. Not in the wheel."""
