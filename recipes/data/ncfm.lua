-- A data set distilled by matching characteristic functions at frequencies that a network learns
-- claim: digits distilled by it beat those that match means of features, and take far less memory than trajectories
-- system: curation.matching with curation.characteristic: pictures go down, the network that draws frequencies up
-- paper: Wang et al. 2025, "Dataset Distillation with Neural Characteristic Function: A Minmax Perspective"
-- time: 3 minutes on one CPU core
--
-- All ways begin with the same real digits and take the same rounds, each with features of the same networks (experts
-- at all stages of their training) and as many real digits. One of two settings is chosen for each, on the first seed
-- by digits that are kept for choices: of the rate of the pictures, and for learnt frequencies of the rate of the
-- network that draws them. They are judged by networks that learn from the pictures alone, at the best of three rates.
-- Means of features are a maximum mean discrepancy with a linear kernel, as distribution matching has it. Beside it
-- characteristic functions at frequencies from a normal distribution, which nobody learns. Bytes are those of a round,
-- and of a gradient of trajectory matching for the same pictures, 50 in each of its steps.
-- Classes are gone through one by one. With pictures this small, frequencies that a network learns are about as good as
-- ones drawn from the normal distribution.
local ty = require "tycho"
local curation, datasets, models = require "tycho.curation", require "tycho.datasets", require "tycho.models"
local condensed, condensing, matching = curation.condensed, curation.condensing, curation.matching
local trajectory = curation.trajectory

local r = ty.recipe.declare {
  seeds = 3,
  args = table.move(condensing.arguments, 1, #condensing.arguments, 5, {
    { "rounds", 200, "of distilling", quick = 2 },
    { "real", 64, "real digits of a class in a round", quick = 4 },
    { "frequencies", 512, "of a round", quick = 8 },
    { "steps", 50, "of trajectory matching, whose bytes are measured", quick = 3 },
  }),
}
local args = r.args

local function all_of(split)
  local set = datasets.load("digits", { split = split })
  return ty.data.batches(set, { batch_size = #set, device = r.device })[1]
end
local training, test = all_of "training", all_of "held_out"
local function make()
  return r:place(function()
    return models.ConvNet { in_channels = 1, size = 8, classes = 10, width = args.width, blocks = 2 }
  end)
end

-- Each with two settings to choose from.
local slow, fast = { image_lr = 0.03 }, { image_lr = 0.1 }
local ways = {
  { "means", { by = "means" }, { slow, fast } },
  { "normal frequencies", { by = "characteristic", learn = false }, { slow, fast } },
  { "learnt frequencies", { by = "characteristic", learn = true }, { { image_lr = 0.03, sampler_lr = 1e-3 },
    { image_lr = 0.03, sampler_lr = 1e-4 } } },
}

local found, sheet, names, bytes = {}, {}, {}, {}
for i, seed in ipairs(r.seeds) do
  ty.manual_seed(seed)
  local trial = condensing.new(training, test, make, { experts = args.experts, epochs = args.epochs,
    networks = args.networks, learn = args.learn })
  local net, networks, teacher = make(), trial:weights(), trial:teacher()
  local embedded = ty.no_grad(function() return teacher:embed(trial.real.image) end)
  local function tell(name, set)
    local share = trial:judge(set)
    ty.stats.put(found, name, i, share)
    r:note("accuracy", { [name] = share }, seed)
    r:say("seed %d, %-32s %.4f", seed, name, share)
    if i == 1 and set.image.shape[1] == 10 then sheet[#sheet + 1], names[#names + 1] = set, name end
  end
  for _, each in ipairs { 1, 10 } do
    local start = condensed.random(trial.real, each)
    local function name(what) return ("%s, %d a class"):format(what, each) end
    tell(name "random", start)
    tell(name "herding", condensed.herding(trial.real, embedded, each))
    for _, way in ipairs(ways) do
      local o = { rounds = args.rounds, real = args.real, frequencies = args.frequencies }
      for key, value in pairs(way[2]) do o[key] = value end
      tell(name(way[1]), (r:choose(name(way[1]), way[3], function(setting, known)
        for key, value in pairs(setting) do o[key] = value end
        ty.manual_seed(1000 + seed)
        local result = matching.distil(net, networks, trial.real, start, o)
        return result, known and 0 or -trial:judge(result, trial.choose)
      end)))
      o.rounds = 1
      local function round() matching.distil(net, networks, trial.real, start, o) end
      if i == 1 then
        bytes[name(way[1])] = r:memory(round)
        r:note(name(way[1]), { bytes = bytes[name(way[1])], seconds = r:clock(round) })
      end
    end
    if i == 1 then
      local order, next_positions = {}, ty.data.rounds(10 * each, math.min(50, 10 * each))
      for k = 1, args.steps do order[k] = ty.tensor(next_positions(), { dtype = "i64" }):to(r.device) end
      for what, way in pairs { ["whole graph"] = trajectory.unrolled, ["step by step"] = trajectory.constant } do
        local function gradient()
          way(net, trial.experts[1][1], trial.experts[1][2], start, { steps = args.steps, order = order })
        end
        bytes[name(what)] = r:memory(gradient)
        r:note(name(what), { bytes = bytes[name(what)], seconds = r:clock(gradient) })
      end
    end
  end
end
r:say("bytes: %s", ty.io.json_encode(bytes))
condensing.sheet(sheet, names):save(r:picture "ncfm.png")

local function above(each, than)
  return ty.stats.differences(found[("learnt frequencies, %d a class"):format(each)],
    found[("%s, %d a class"):format(than, each)])
end
local learnt, graph, single = "learnt frequencies, 10 a class", "whole graph, 10 a class", "step by step, 10 a class"
local rows = {
  { claim = "ten digits a class: accuracy above matched means", values = above(10, "means"), bar = 0.003 },
  { claim = "one digit a class: the same", values = above(1, "means"), bar = 0.003 },
  { claim = "ten digits a class: accuracy above real ones", values = above(10, "random"), bar = 0.005 },
  { claim = ("bytes of a round, of those of %d steps of a trajectory"):format(args.steps),
    measured = bytes[learnt] / bytes[graph], bar = 0.1, below = true },
  { claim = "the same, of a trajectory step by step", measured = bytes[learnt] / bytes[single], judged = false },
}
local function show(claim, values) rows[#rows + 1] = { claim = claim, values = values, judged = false } end
for _, each in ipairs { 1, 10 } do
  show(("%d a class: learnt frequencies above normal ones"):format(each), above(each, "normal frequencies"))
  for _, what in ipairs { "random", "herding", "means", "normal frequencies", "learnt frequencies" } do
    local name = ("%s, %d a class"):format(what, each)
    show("accuracy: " .. name, found[name])
  end
end
os.exit(r:finish(rows), true)
