-- Optimizers compared at equal budget: runs that are kept, the search for a rate, what is projected.
local here = (arg and arg[0]:match ".*/" or "tests/modules/llm/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local llm = require "tycho.llm"
local folder = os.tmpname()
os.remove(folder)

local text = {}
for i = 1, 40 do text[i] = ("chapter %d of the book of numbers: %s\n"):format(i, ("so many words "):rep(i % 7 + 1)) end
local function corpus(validation)
  return llm.corpus.open { folder = folder .. "/corpus", text = table.concat(text, "\n"), every = 5,
    validation = validation, vocabulary = 300, length = 32 }
end

local said = {}
local function open(steps)
  return llm.trials.open(corpus(true), { folder = folder .. "/runs", model = { width = 32, layers = 1 },
    train = { steps = steps or 3, batch = 2 }, say = function(line) said[#said + 1] = line end })
end

check.test("a run is kept until its settings change", function()
  local galore = llm.trials.galore(4, 2, 0.95)
  local first = open():run(galore, 0.01, 1)
  check.equal(#said, 1)
  local second = open():run(galore, 0.01, 1)
  check.equal(#said, 1, "found")
  for _, key in ipairs { "validation", "held_out", "state_bytes", "parameters" } do
    check.equal(second[key], first[key])
    check.ok(first[key] > 0)
  end
  open(4):run(galore, 0.01, 1)
  check.equal(#said, 2, "other settings")
  local adamw = open():run(llm.trials.adamw(0.95), 0.01, 1)
  check.equal(adamw.state_bytes, 8 * adamw.parameters)
  local model = corpus(true):model { width = 32, layers = 1 }
  local matrices, others = llm.trials.split(model)
  check.equal({ #matrices, #others }, { 7, 4 }) -- the embedding and three norms
  local bytes = 0
  for _, p in ipairs(others) do bytes = bytes + 8 * p:numel() end
  for _, p in ipairs(matrices) do
    local long, short = math.max(p:size(0), p:size(1)), math.min(p:size(0), p:size(1))
    bytes = bytes + 8 * 4 * long + 4 * 4 * short
  end
  check.equal(first.state_bytes, bytes)
end)

check.test("a run that runs away has an infinite loss", function()
  local trials = open()
  for _ = 1, 2 do
    local run = trials:run({ name = "SGD", class = "SGD" }, 1e30, 1)
    check.equal({ run.validation, run.held_out }, { math.huge, math.huge })
  end
end)

check.test("the rate is looked for around the first", function()
  local function tune(least, tries)
    local trials, tried = open(), {}
    trials.run = function(_, _, rate)
      tried[#tried + 1] = rate
      return { validation = math.abs(math.log(rate / least, 2)) }
    end
    return trials:tune({}, 1, tries, 0), tried
  end
  check.equal({ tune(1, 1) }, { 1.0, { 1.0 } })
  check.equal({ tune(5, 4) }, { 4.0, { 1.0, 2.0, 4.0, 8.0 } })
  check.equal({ tune(0.2, 4) }, { 0.25, { 1.0, 2.0, 0.5, 0.25 } })
  local rate, tried = tune(1.3, 5)
  check.close({ rate, tried[4], tried[5] }, { math.sqrt(2), math.sqrt(2), 2 ^ 0.25 }, 1e-12)
end)

check.test("mistakes are errors", function()
  check.fails(function() llm.trials.open(corpus(true), {}) end, "folder: expected a folder")
  check.fails(function() llm.trials.open(corpus(false), { folder = folder }) end, "needs a part `validation`")
end)

local function remove_all(path)
  if ty.io.stat(path).kind == "directory" then
    for _, name in ipairs(ty.io.listdir(path)) do remove_all(path .. "/" .. name) end
  end
  ty.io.remove(path)
end
remove_all(folder)
check.finish()
