"""What a decoder-only checkpoint is, read from its Hugging Face config; torch-free.

One `ModelSpec` covers Llama 2/3.x, Mistral, Qwen2/2.5, Qwen3, Phi-3, OPT and GPT-NeoX/Pythia: the differences are data.
"""
