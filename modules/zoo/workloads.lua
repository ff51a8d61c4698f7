--- What recipes share that compare optimizers: four small workloads of different kinds, each with batches by a seed, a
-- loss, and a loss on data that is not trained on. Language (a Llama on the Bible), flow matching (a DiT on digits), a
-- classifier of digits by convolutions, and an autoencoder of emoji.
--
--     for _, work in ipairs(zoo.workloads.all { folder = r:path "corpus" }) do
--       local model, loader = work.model(), work.loader(seed)
--       optimizer:step(work.loss(model, loader:next()))
--       print(work.name, work.held(model, "held_out"))          -- or "validation"
--     end
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.datasets"
local diffusion = require "tycho.diffusion"
local llm = require "tycho.llm"

local nn = ty.nn
local M = {}

local function language(o)
  local text = ty.data.kjv { books = 1 }:sub(1, o.small and 9000 or -1)
  local corpus = llm.corpus.open { folder = o.folder, text = text, validation = true, length = 32,
    vocabulary = o.small and 257 or 300, every = o.small and 3 or nil }
  return {
    model = function() return corpus:model { width = 64, layers = 2 } end,
    loader = function(seed)
      return ty.data.DataLoader(corpus.training, { batch_size = math.max(1, o.batch // 2), shuffle = true,
        seed = seed })
    end,
    loss = function(model, b)
      return model:loss(b.tokens, b.targets, { cu_seqlens = b.cu_seqlens, longest = b.longest })
    end,
    held = function(model, part) return corpus:evaluate(model, part, { batch = 64 }).loss end,
  }
end

-- The rest of a workload of pictures, { model, loss }, with its parts as datasets.
local function of_pictures(o, work, training, validation, held_out)
  local parts = { validation = validation, held_out = held_out }
  for name, set in pairs(parts) do
    parts[name] = ty.data.DataLoader(set, { batch_size = #set }):next()
    for _, t in pairs(parts[name]) do if ty.is_tensor(t) then ty.keep(t) end end
  end
  function work.loader(seed)
    return ty.data.DataLoader(training, { batch_size = o.batch, shuffle = true, drop_last = true, seed = seed })
  end
  function work.held(model, part)
    ty.manual_seed(1) -- the same noise for all
    return ty.no_grad(work.loss, model, parts[part]):item()
  end
  return work
end

local function digits() return ty.data.digits { split = { 0.8, 0.1, 0.1 }, seed = 0 } end

local function flow_matching(o)
  local flow = diffusion.Flow()
  return of_pictures(o, {
    model = function() return diffusion.DiT { width = 64, depth = 2, heads = 2, classes = 10 } end,
    loss = function(model, b) return flow:loss(model, b.image, { labels = b.label }) end,
  }, digits())
end

local function classifier(o)
  return of_pictures(o, {
    model = function()
      return nn.Sequential(nn.Conv2d(1, 16, 3, { padding = 1 }), nn.ReLU(), nn.Conv2d(16, 32, 3, { padding = 1 }),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
    end,
    loss = function(model, b) return nn.cross_entropy(model(b.image), b.label) end,
  }, digits())
end

-- Emoji on white, f32 [n, 3, 16, 16] from -1 to 1.
local function emoji(split, count)
  local set, list = datasets.load("emoji", { size = 64, split = split }), {}
  for i = 1, count do
    list[i] = ty.scope(function()
      local picture = set:get((i - 1) * (#set // count)).image:to "f32" / 255
      local alpha = picture:narrow(0, 3, 1)
      return (picture:narrow(0, 0, 3) * alpha + 1 - alpha):unsqueeze(0):avg_pool2d(4):squeeze(0) * 2 - 1
    end)
  end
  return ty.data.TensorDataset { image = ty.keep(ty.stack(list, 0)) }
end

local function autoencoder(o)
  local count = o.pictures
  return of_pictures(o, {
    model = function()
      return nn.Sequential(nn.Conv2d(3, 16, 3, { stride = 2, padding = 1 }), nn.SiLU(),
        nn.Conv2d(16, 32, 3, { stride = 2, padding = 1 }), nn.SiLU(), nn.Flatten(), nn.Linear(512, 32),
        nn.Linear(32, 256), nn.SiLU(), nn.Linear(256, 768), nn.Tanh())
    end,
    loss = function(model, b) return nn.mse_loss(model(b.image), b.image:flatten(1)) end,
  }, emoji("training", count), emoji("validation", count // 4), emoji("held_out", count // 4))
end

local makers = { { "language", language }, { "flow matching", flow_matching }, { "classifier", classifier },
  { "autoencoder", autoencoder } }

--- A workload: name; model(), new weights of the generator; loader(seed), batches without end; loss(model, batch);
-- held(model, part), a loss on the part "validation" or "held_out".
---@class Workload
---@field name string
---@field model fun(): Module
---@field loader fun(seed: integer): DataLoader
---@field loss fun(model: Module, batch: table): Tensor
---@field held fun(model: Module, part: string): number

--- All four. options: folder (of the corpus's token files), batch (16: pictures of a step; rows of text half as many),
-- pictures (400: emoji to train on), small (false: less text, to see that everything works).
---@param options {folder: string, batch?: integer, pictures?: integer, small?: boolean}
---@return Workload[]
function M.all(options)
  local who = "zoo.workloads.all"
  local o = arguments.read(who, options, { folder = arguments.none, batch = 16, pictures = 400, small = false },
    { folder = "a string", batch = "an integer >= 1", pictures = "an integer >= 4" })
  arguments.expect(who, "folder", o.folder, "a string")
  local list = {}
  for i, maker in ipairs(makers) do
    list[i] = maker[2](o)
    list[i].name = maker[1]
  end
  return list
end

return M
