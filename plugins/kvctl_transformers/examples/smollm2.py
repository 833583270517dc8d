"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from a GGUF file: `python smollm2.py FILE.gguf FOLDER`.

The weights are those of the GGUF (4 bits, so not bit for bit the published ones), written as BF16 safetensors. Needs
transformers, gguf and accelerate. Takes a minute or two. The folder appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings


def convert(gguf: str, folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    place, name = os.path.split(os.path.abspath(gguf))
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    read = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    # a model that was read from GGUF cannot be saved as it is: its weights go into a plain one
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
    model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in read.state_dict().items()})
    model.tie_weights()
    staged = f"{folder}.{os.getpid()}"
    model.save_pretrained(staged)
    tokenizer.save_pretrained(staged)
    try:
        os.rename(staged, folder)
    except OSError:  # another process was faster
        shutil.rmtree(staged, ignore_errors=True)


if __name__ == "__main__":
    convert(*sys.argv[1:3])
