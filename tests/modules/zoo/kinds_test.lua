-- The ten networks of three kinds: which they are, a step on the meta device and the CPU, modes, mistakes.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local zoo = require "tycho.zoo"

local sizes = { batch = 4, size = 8, width = 32, layers = 1, tokens = 16 }
local list = zoo.kinds.all(sizes)
local by_name = {}
for _, work in ipairs(list) do by_name[work.name] = work end

check.test("names, kinds, checkpoints", function()
  local kinds, checkpoints = {}, {}
  for _, work in ipairs(list) do
    kinds[work.kind] = (kinds[work.kind] or 0) + 1
    if work.checkpoints then checkpoints[#checkpoints + 1] = work.name end
  end
  check.equal(kinds, { language = 4, diffusion = 3, vision = 3 })
  check.equal(checkpoints, { "Llama", "GPT-2", "GPT-NeoX" })
end)

check.test("a step on the meta device and on the CPU", function()
  for _, work in ipairs(list) do
    local seen, parameters = ty.profile.foresee(function(device)
      local step, model = zoo.kinds.training(work, device)
      step()
      return model:count_parameters()
    end)
    local step, model = zoo.kinds.training(work, "cpu")
    check.equal(parameters, model:count_parameters(), work.name)
    local before, same = {}, 0
    for i, p in ipairs(model:parameters()) do before[i] = p:detach():clone() end
    step()
    for i, p in ipairs(model:parameters()) do same = same + (p:equal(before[i]) and 1 or 0) end
    check.ok(same < #before, work.name .. ": weights are trained")
    check.ok(seen.peak > 16 * parameters and seen.flops > 0, work.name .. ": weights, gradients and two moments")
    local loss = work.loss(model, "cpu"):item()
    check.ok(loss >= 0 and loss < math.huge, work.name)
  end
  -- Two convolutions, two norms, a head of 10 over 4 x 4 places.
  check.equal(by_name.convolutions.model():count_parameters(),
    64 * 28 + 2 * 64 + 128 * (64 * 9 + 1) + 2 * 128 + 10 * (128 * 4 * 4 + 1))
end)

check.test("the modes of a step", function()
  local function after(mode, seed)
    local step, model = zoo.kinds.training(by_name.Llama, "cpu", { mode = mode, seed = seed })
    step()
    step()
    return model:parameters()[1]:detach():clone()
  end
  local plain = after()
  check.equal(plain:equal(after "plain"), true)
  check.equal(plain:equal(after "checkpoints"), true) -- the same numbers, computed again
  check.equal(plain:equal(after "bf16"), false)
  check.equal(plain:equal(after("plain", 1)), false)
  local function kept(mode)
    return (ty.profile.foresee(function(device)
      local work = zoo.kinds.all { batch = 16, width = 64, layers = 4, tokens = 128 }[1]
      zoo.kinds.training(work, device, { mode = mode })()
    end)).peak
  end
  check.ok(kept "checkpoints" < 0.9 * kept "plain")
end)

check.test("mistakes", function()
  check.fails(function() zoo.kinds.all { batch = 3 } end, "zoo.kinds.all: batch: expected an integer >= 4, got 3")
  check.fails(function() zoo.kinds.all { size = 10 } end, "zoo.kinds.all: size: expected a multiple of 4, got 10")
  check.fails(function() zoo.kinds.training(3, "cpu") end, "zoo.kinds.training: work: expected a table, got 3")
  check.fails(function() zoo.kinds.training({}, "cpu") end, "work.model: expected a function, got nil")
  check.fails(function() zoo.kinds.training(list[1]) end, "device: expected a string, got nil")
  check.fails(function() zoo.kinds.training(list[1], "cpu", { mode = "fast" }) end, 'mode: expected "plain" or ')
  check.fails(function() zoo.kinds.training(by_name.BERT, "cpu", { mode = "checkpoints" }) end,
    'mode: expected "plain" or "bf16" of a network without checkpoints, got "checkpoints" of BERT')
end)

check.finish()
