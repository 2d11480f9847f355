"""The names of the catalogue, for helps."""

# models.catalogue.names(), spelt out since --help imports no room; a test compares them
MODELS = (
    "gpt-30m", "gpt-125m", "gpt-350m", "gpt-760m", "gpt-1.3b", "gpt-2.6b", "gpt-6.7b", "gpt-15b",
    "gpt-39b", "gpt-76b",
)  # fmt: skip

DECODERS = (  # models.catalogue.decoder_names(), likewise
    "llama-2-7b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "llama-3.1-8b", "llama-3.1-70b",
    "llama-3.1-405b", "mixtral-8x7b", "mixtral-8x22b", "deepseek-v2-lite", "deepseek-v2",
    "deepseek-v3", "qwen3-235b-a22b", "gpt-oss-120b", "llama-4-maverick",
)  # fmt: skip
