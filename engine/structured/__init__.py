"""Answers that must look like something: grammars compiled, and made ready before the core sees them."""
