"""llama.cpp (the package llama-cpp-python) on a GGUF file: one token after others, a prompt. Weights mapped from the file,
and read into memory; as many threads as PyTorch has been given."""
import ctypes
import os

import llama_cpp as llama
import torch

root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
quiet = llama.llama_log_callback(lambda level, text, data: None)
llama.llama_log_set(quiet, ctypes.c_void_p(0))
llama.llama_backend_init()


class Context:
    def __init__(self, path, mapped, room):
        options = llama.llama_model_default_params()
        options.use_mmap = mapped
        self.model = llama.llama_model_load_from_file(os.path.join(root, path).encode(), options)
        options = llama.llama_context_default_params()
        options.n_ctx = room
        options.n_batch = options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        self.context = llama.llama_init_from_model(self.model, options)
        self.memory = llama.llama_get_memory(self.context)

    def run(self, count, past):
        """`count` tokens after the first `past` ones; the most likely next one."""
        llama.llama_memory_seq_rm(self.memory, 0, past, -1)
        tokens = (llama.llama_token * count)()
        if llama.llama_decode(self.context, llama.llama_batch_get_one(tokens, count)):
            raise RuntimeError("llama_decode failed")
        return llama.llama_get_logits_ith(self.context, -1)[0]

    def __del__(self):
        llama.llama_free(self.context)
        llama.llama_model_free(self.model)


def modes(path, count, past):
    made = {}
    for mode, mapped in {"mapped": True, "read": False}.items():
        context = Context(path, mapped, 1024)
        if past:
            context.run(past, 0)
        made[mode] = lambda context=context: context.run(count, past)
    return made


def decode(path, past):
    return modes(path, 1, past)


def prompt(path, count):
    return modes(path, count, 0)
