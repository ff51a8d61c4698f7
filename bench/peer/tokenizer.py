"""The twin of bench/items/tokenizer.lua: huggingface's tokenizers, on the text and the tokenizer that it leaves."""
import os

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "build", "bench")


def text():
    with open(os.path.join(folder, "tokenizer.txt"), encoding="utf-8", errors="replace") as f:
        return f.read()


def documents(size):
    whole = text()
    return [whole[i:i + size] for i in range(0, len(whole), size)]


def encode():
    tok = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    docs = documents(8192)
    return {"encode_batch": lambda: tok.encode_batch(docs), "encode_batch_fast": lambda: tok.encode_batch_fast(docs)}


def train(vocabulary):
    pattern = Tokenizer.from_file(os.path.join(folder, "tokenizer.json")).pre_tokenizer
    docs = documents(1 << 15)

    def run():
        tok = Tokenizer(models.BPE())
        tok.pre_tokenizer = pattern
        tok.train_from_iterator(docs, trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False,
                                                          initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))

    return {"train_from_iterator": run}
