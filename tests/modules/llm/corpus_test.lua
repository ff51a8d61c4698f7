-- The corpus of the recipes: its parts, its tokenizer, and a trained model that is kept.
local here = (arg and arg[0]:match ".*/" or "tests/modules/llm/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local folder = os.tmpname()
os.remove(folder)

local text = {}
for i = 1, 40 do text[i] = ("chapter %d of the book of numbers: %s\n"):format(i, ("so many words "):rep(i % 7 + 1)) end
text = table.concat(text, "\n")
local function open(more)
  local options = { folder = folder, text = text, every = 5, validation = true, vocabulary = 300, length = 32 }
  for key, value in pairs(more or {}) do options[key] = value end
  return llm.corpus.open(options)
end

check.test("every document is in one part, and the tokens of a part are its text", function()
  local corpus = open()
  local all = {}
  for part, documents in pairs(corpus.documents) do
    local bytes, tokens = 0, 0
    for i, document in ipairs(documents) do
      check.ok(not all[document])
      all[document] = part
      bytes = bytes + #document
      local ids = corpus.ids[part][i]
      tokens = tokens + ids:numel()
      check.equal(ids:select(0, 0):item(), corpus.eos)
      check.equal(corpus.tokenizer:decode(ids:narrow(0, 1, ids:numel() - 2)), document)
    end
    check.equal(corpus.bytes[part], bytes)
    check.equal(corpus[part].total, tokens)
  end
  local count = 0
  for _ in pairs(all) do count = count + 1 end
  check.equal(count, 40)
  check.equal({ #corpus.documents.held_out, #corpus.documents.validation }, { 8, 8 })
  check.equal(open({ validation = false }).validation, nil)
end)

check.test("the batches of a part predict every token once", function()
  local corpus = open()
  local batches, tokens, seen = corpus:batches("held_out", { batch = 3 }), 0, {}
  for i, batch in ipairs(batches) do
    tokens = tokens + batch.count
    check.equal(batch.tokens.shape[1], 1)
    check.ok(batch.tokens.shape[2] == 3 * 32 or i == #batches)
    for _, id in ipairs(batch.tokens:reshape(-1):tolist()) do seen[#seen + 1] = id end
  end
  check.equal(tokens, corpus.held_out.total - #corpus.documents.held_out, "all but what begins a document")
  local all = {}
  for _, ids in ipairs(corpus.ids.held_out) do table.move(ids:tolist(), 1, ids:numel(), #all + 1, all) end
  check.equal(table.move(seen, 1, #all, 1, {}), all)
  check.fails(function() corpus:batches "heldout" end, "batches: part: expected a part of the corpus, got \"heldout\"")
  check.fails(function() corpus:batches() end, "batches: part: expected a part of the corpus, got nil")
end)

check.test("the files under a folder, in the order of their names", function()
  local root = folder .. "-files"
  ty.io.mkdir(root .. "/b")
  for name, content in pairs { ["c.lua"] = "3", ["b/z.lua"] = "2", ["a.lua"] = "1", ["b/y.txt"] = "no" } do
    ty.io.write_atomic(root .. "/" .. name, content)
  end
  check.equal(llm.corpus.files(root, "%.lua$"), { "1", "2", "3" })
  check.equal(llm.corpus.files(root .. "/b", "%.md$"), {})
  check.fails(function() llm.corpus.files(root) end, "llm.corpus.files: pattern: expected a string, got nil")
end)

check.test("more books hold out the same chapters of the first ones", function()
  local function held_out(books)
    return llm.corpus.open({ folder = folder, books = books, vocabulary = 257 }).documents.held_out
  end
  local one, two = held_out(1), held_out(2)
  check.equal({ #one, #two }, { 5, 9 })
  check.equal(table.move(two, 1, 5, 1, {}), one)
end)

check.test("one more part to measure on", function()
  local corpus = open()
  local few = table.move(corpus.documents.held_out, 1, 3, 1, {})
  local total = 0
  for i = 1, 3 do total = total + corpus.ids.held_out[i]:numel() end
  check.equal(corpus:part("few", few).total, total)
  local model = corpus:model { width = 32, layers = 1 }
  local result = corpus:evaluate(model, "few")
  check.close(result.bits_per_byte, result.loss * result.tokens / math.log(2) / corpus.bytes.few, 1e-9)
  check.fails(function() corpus:part("few", few) end, "name: expected a new one, got 'few'")
  check.fails(function() corpus:part("none", {}) end, "documents: expected at least one")
end)

check.test("a trained model is kept until its settings change", function()
  local corpus = open()
  local options = { folder = folder .. "/model", model = { width = 32, layers = 1 },
    train = { steps = 4, quiet = true } }
  local first, second = corpus:trained(options), corpus:trained(options)
  check.equal(corpus:evaluate(second).loss, corpus:evaluate(first).loss)
  check.ok(math.abs(corpus:evaluate(first, "training").bits_per_byte) < 20)
  local tokenizer = llm.tokenizer(options.folder)
  check.equal({ tokenizer.size, tokenizer.bos, tokenizer.eos }, { corpus.tokenizer.size, corpus.eos, corpus.eos })
  check.equal(tokenizer:encode("words 7"):tolist(), corpus.tokenizer:encode("words 7"):tolist())
  check.equal(second.config.eos_token_id, corpus.eos, "generation ends with the document")
  local other = corpus:trained { folder = options.folder, model = options.model, train = { steps = 5, quiet = true } }
  check.ok(corpus:evaluate(other).loss ~= corpus:evaluate(first).loss)
end)

check.test("another text in the same tokens", function()
  local corpus, documents = open(), {}
  for i = 1, 12 do documents[i] = ("local x = %d\n\nreturn x\n"):format(i) end
  local other = corpus:other { folder = folder .. "/other", documents = documents, every = 4, validation = true }
  check.equal({ #other.documents.training, #other.documents.validation, #other.documents.held_out }, { 6, 3, 3 })
  local ids = other.ids.held_out[1]
  check.equal(corpus.tokenizer:decode(ids:narrow(0, 1, ids:numel() - 2)), documents[4])
  check.equal(other.eos, corpus.eos)
  check.ok(other:evaluate(corpus:model { width = 32, layers = 1 }).bits_per_byte > 0)
  check.fails(function() corpus:other { documents = documents } end, "folder: expected a folder")
  check.fails(function() corpus:other { folder = folder .. "/other" } end, "no document of 0")
end)

check.test("mistakes are errors", function()
  check.fails(function() llm.corpus.open {} end, "folder")
  check.fails(function() open { every = 1 } end, "every must be an integer of at least 3, got 1")
  check.fails(function() open { text = "one\n\ntwo" } end, "no document of 2 for the part held_out")
  check.fails(function() open():trained {} end, "folder: expected a folder")
end)

local function remove_all(path)
  for _, name in ipairs(ty.io.stat(path).kind == "directory" and ty.io.listdir(path) or {}) do
    remove_all(path .. "/" .. name)
  end
  ty.io.remove(path)
end
remove_all(folder)
check.finish()
