"""vLLM looks for its platform when it is first imported, by whichever test that is."""

import os

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_TARGET_DEVICE": "cpu"}
