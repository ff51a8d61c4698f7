-- The classes of characters that tokenizers go by, on every code point, against those of huggingface's `tokenizers`
-- (tests/fixtures/tokenizers/characters.json, make_characters.py).
local check = dofile((arg[0]:match(".*/") or "./") .. "check.lua")
local ty = require "tycho"

local expected = ty.io.load_json(check.root .. "tests/fixtures/tokenizers/characters.json")

-- A tokenizer that has one step and knows no word, and the places of its words.
local function words(step, text)
  local tok = ty.tokenizer.parse(ty.io.json_encode { pre_tokenizer = step,
    model = { type = "WordLevel", vocab = { ["?"] = 0 }, unk_token = "?" } })
  local _, more = tok:encode(text, { offsets = true })
  return more.offsets
end

-- Every code point, with a separator before, between and behind them; separators may be a list to take turns.
local function all_between(separators)
  local parts = { separators[1] }
  for c = 0, 0x10ffff do
    if c < 0xd800 or c > 0xdfff then parts[#parts + 1] = utf8.char(c) .. separators[c % #separators + 1] end
  end
  return table.concat(parts)
end

local texts = { ["a"] = all_between { "a" }, [" "] = all_between { " " } }

-- Code points in their order as lengths of runs: first of those that are missing, then of those that are there, and so
-- on.
local function runs_of(points)
  local runs, last = {}, -1
  for _, c in ipairs(points) do
    if c == last + 1 and #runs > 0 then
      runs[#runs] = runs[#runs] + 1
    else
      table.move({ c - last - 1, 1 }, 1, 2, #runs + 1, runs)
    end
    last = c
  end
  return runs
end

-- The runs of all others, surrogates left out.
local function others(runs)
  local points, c, inside = {}, 0, true
  for i = 1, #runs + 1 do
    local last = runs[i] and c + runs[i] - 1 or 0x10ffff
    for k = c, inside and last or -1 do
      if k < 0xd800 or k > 0xdfff then points[#points + 1] = k end
    end
    c, inside = last + 1, not inside
  end
  return runs_of(points)
end

-- The code points that are words of their own between separators, which are not.
local function alone(step, separator)
  local text, points = texts[separator], {}
  for _, span in ipairs(words(step, text):tolist()) do
    local first, last = span[1], span[2]
    if last - first <= 4 then
      local c = utf8.codepoint(text, first + 1)
      local char = utf8.char(c)
      if #char == last - first and char ~= separator then points[#points + 1] = c end
    end
  end
  return runs_of(points)
end

local function split(regex)
  return { type = "Split", pattern = { Regex = regex }, behavior = "Isolated", invert = false }
end

for name, want in pairs(expected.sets) do
  check.test(name, function()
    if name == "digits" then
      check.equal(alone({ type = "Digits", individual_digits = true }, "a"), want)
    elseif name == "punctuation" then
      check.equal(alone({ type = "Punctuation", behavior = "Isolated" }, "a"), want)
      check.equal(alone({ type = "BertPreTokenizer" }, "a"), want)
    elseif name == "whitespace" then
      -- What \w is there joins the letters around it: what begins a word behind one is not of it.
      local text, points = texts["a"], {}
      for _, span in ipairs(words({ type = "Whitespace" }, text):tolist()) do
        local word = text:sub(span[1] + 1, span[2])
        local letters = span[2] - span[1] > 2 and word:match "^a(.+)a$"
        if letters then
          local between = false -- the letters themselves
          for _, c in utf8.codes(letters) do
            between = not between
            if between then points[#points + 1] = c end
          end
        end
      end
      check.equal(runs_of(points), want)
    else
      check.equal(alone(split(name), name == "\\s" and "a" or " "), want)
    end
  end)
end

check.test("what is not of a class", function()
  check.equal(alone(split "\\P{L}", "a"), others(expected.sets["\\p{L}"]), "\\P{L}")
end)

-- ---- normalizers, and the scanners of byte-level models ----

local bytes = ty.io.json_decode(ty.tokenizer.train({}, { vocabulary = 256 }):json())

local function with(key, step)
  local whole = {}
  for name, value in pairs(bytes) do whole[name] = value end
  whole[key] = step
  return ty.tokenizer.parse(ty.io.json_encode(whole))
end

local blocks = {} -- but for planes where nothing is assigned or all is private
for start = 0, 0x10f000, 0x1000 do
  local parts = {}
  if start > 0x34000 and start ~= 0xe0000 and start ~= 0x10f000 then goto continue end
  for c = start, start + 0xfff do
    if c < 0xd800 or c > 0xdfff then parts[#parts + 1] = utf8.char(c) .. "\n" end
  end
  blocks[start // 0x1000 + 1] = table.concat(parts)
  ::continue::
end

-- The sum of bytes times their places, both from 1.
local function checksum(text)
  local x = ty.io.from_bytes(text, "u8"):to "i64"
  return ((x + 1) * ty.arange(1, #text + 1)):sum():item()
end

local function bert(step)
  local o = { type = "BertNormalizer", clean_text = false, handle_chinese_chars = false, strip_accents = false,
    lowercase = false }
  o[step] = true
  return o
end

for name, sums in pairs(expected.normalized) do
  check.test(name, function()
    local tok, wrong = with("normalizer", name:find "^%u" and { type = name } or bert(name)), {}
    for i, text in pairs(blocks) do
      text = tok:decode(tok:encode(text), { skip_special = false })
      if checksum(text) ~= sums[i] then wrong[#wrong + 1] = ("from U+%04X on"):format((i - 1) * 0x1000) end
    end
    check.equal(wrong, {}, name)
  end)
end

check.test("scanners stop where the regular expressions do", function()
  local text = all_between { " ", "a", "1" }
  local level = { type = "ByteLevel", add_prefix_space = false, trim_offsets = false, use_regex = true }
  local gpt2 = [['s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+]]
  local scanned, matched = words(level, text), words(split("(?:" .. gpt2 .. ")"), text)
  check.equal(scanned.shape, matched.shape)
  check.ok(scanned:eq(matched):all():item())
end)

check.finish()
