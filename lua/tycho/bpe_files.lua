--- Byte-level BPE as older checkpoints have it, in vocab.json and merges.txt: what a tokenizer.json would say of it.
-- Radford et al. 2019 (GPT-2); Radford et al. 2021 (CLIP, whose words end with "</w>").
local core = require "tycho.core"

local io = core.io
local M = {}

local clip_words = "'s|'t|'re|'ve|'m|'ll|'d|[\\p{L}]+|[\\p{N}]|[^\\s\\p{L}\\p{N}]+"

local function special(vocab, names)
  local list = {}
  for _, name in ipairs(names) do
    if vocab[name] then
      list[#list + 1] = { id = vocab[name], content = name, single_word = false, lstrip = false, rstrip = false,
        normalized = false, special = true }
    end
  end
  return io.array(list)
end

local function clip(vocab)
  local first, last = "<|startoftext|>", "<|endoftext|>"
  return {
    normalizer = { type = "Sequence", normalizers = { { type = "NFC" },
      { type = "Replace", pattern = { Regex = "\\s+" }, content = " " }, { type = "Lowercase" } } },
    pre_tokenizer = { type = "Sequence", pretokenizers = {
      { type = "Split", pattern = { Regex = clip_words }, behavior = "Removed", invert = true },
      { type = "ByteLevel", add_prefix_space = false, trim_offsets = true, use_regex = true } } },
    post_processor = vocab[first] and vocab[last] and { type = "RobertaProcessing", sep = { last, vocab[last] },
      cls = { first, vocab[first] }, trim_offsets = false, add_prefix_space = false } or io.null,
    added_tokens = special(vocab, { first, last }),
    model = { unk_token = vocab[last] and last or nil, end_of_word_suffix = "</w>" },
  }
end

local function gpt2(vocab)
  return {
    normalizer = io.null, post_processor = io.null,
    pre_tokenizer = { type = "ByteLevel", add_prefix_space = false, trim_offsets = true, use_regex = true },
    added_tokens = special(vocab, { "<|endoftext|>" }), model = {},
  }
end

--- Whether a folder has the two files.
---@param folder string
---@return boolean
function M.are_in(folder) return io.exists(folder .. "/vocab.json") and io.exists(folder .. "/merges.txt") end

--- The text of a tokenizer.json for a folder with vocab.json and merges.txt.
---@param folder string
---@return string
function M.json(folder)
  local path = folder .. "/vocab.json"
  local vocab, merges, suffixes = io.load_json(path), {}, false
  if type(vocab) ~= "table" then error(("%s: expected an object, got a plain value"):format(path), 0) end
  for token, id in pairs(vocab) do
    if type(token) ~= "string" or math.type(id) ~= "integer" then
      error(("%s: expected tokens and their ids, got %s = %s"):format(path, tostring(token), tostring(id)), 0)
    end
    suffixes = suffixes or token:sub(-4) == "</w>" and #token > 4
  end
  for line in (io.read(folder .. "/merges.txt") .. "\n"):gmatch "(.-)\r?\n" do
    if line ~= "" and not line:find "^#version" then merges[#merges + 1] = line end
  end
  local whole = (suffixes and clip or gpt2)(vocab)
  whole.version, whole.truncation, whole.padding = "1.0", io.null, io.null
  whole.decoder = { type = "ByteLevel", add_prefix_space = true, trim_offsets = true, use_regex = true }
  local model = whole.model
  model.type, model.vocab, model.merges = "BPE", vocab, io.array(merges)
  model.fuse_unk, model.byte_fallback = false, false
  return io.json_encode(whole)
end

return M
