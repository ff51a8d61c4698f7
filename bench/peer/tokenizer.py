"""The twin of bench/items/tokenizer.lua: huggingface's tokenizers, on the text and the tokenizer that it leaves."""
import os

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer

folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "build", "bench")


def encode(size):
    tok = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    with open(os.path.join(folder, "tokenizer.txt"), "rb") as f:
        text = f.read()
    docs = [text[i:i + size].decode("utf-8", "replace") for i in range(0, len(text), size)]
    return {"encode_batch": lambda: tok.encode_batch(docs), "encode_batch_fast": lambda: tok.encode_batch_fast(docs)}
