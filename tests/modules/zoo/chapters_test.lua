-- The text of the zoo's language models in parts: which chapters they are, and what is refused.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local datasets, zoo = require "tycho.datasets", require "tycho.zoo"

-- The chapters of a token file.
local function texts(name, tokenizer)
  local file = ty.io.load(scratch.file(name .. ".safetensors"))
  local starts, list = file.starts:tolist(), {}
  for i = 1, #starts - 1 do
    local ids = file.tokens:to("i64"):narrow(0, starts[i], starts[i + 1] - starts[i])
    list[i] = tokenizer:decode(ids:narrow(0, 1, ids:numel() - 2))
  end
  return list
end

check.test("what is calibrated with was trained on; the other parts were not, and share no chapter", function()
  local function parts(seed)
    return zoo.chapters { folder = scratch.folder, seed = seed, training = 5, validation = 3, held_out = 4 }
  end
  local found = parts(1)
  local unseen, size = {}, 0
  local held_out = datasets.load("kjv", { split = "held_out" })
  for i = 0, #held_out - 1 do unseen[held_out:get(i).text] = true end
  local counts, first = { training = 5, validation = 3, held_out = 4 }, nil
  for name, count in pairs(counts) do
    local list = texts(name, found.tokenizer)
    check.equal(#list, count)
    for _, text in ipairs(list) do
      check.equal(unseen[text] == true, name ~= "training", name)
      if name == "held_out" then size = size + #text end
      if name ~= "training" then unseen[text] = nil end -- in one part alone
    end
    if name == "training" then first = list end
  end
  check.equal(found.bytes, size)
  check.equal(texts("training", parts(1).tokenizer), first)
  check.ok(texts("training", parts(2).tokenizer)[1] ~= first[1])
  check.ok(found.held_out.size > 0)
end)

check.test("what is refused", function()
  check.fails(function() zoo.chapters {} end, "zoo.chapters: folder: expected a folder for the token files, got none")
  check.fails(function() zoo.chapters { folder = scratch.folder, held_out = 60 } end,
    "held_out: expected an integer in")
end)

scratch.clean()
check.finish()
