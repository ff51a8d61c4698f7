--- Encoders of pictures and texts, selective scans, pictures from JPEG files: ViT-B/16 at 224 x 224, the text encoder
-- of CLIP ViT-B/32 with 77 tokens, a layer of Mamba's scan with 1,536 channels of 16 states, the photographs of
-- datasets/photos decoded at 224 x 224. The limit of the encoders is their operations at the FMA rate.
local ty = require "tycho"
local optim = ty.optim

local items = {}
local batch, tokens, width, layers = 8, 197, 768, 12
local image = 2 * (tokens * 12 * width * width * layers + 196 * width * width) + 4 * tokens * tokens * width * layers

-- A forward pass, as it is called and compiled.
local function passes(fn)
  local function looked_at(f)
    return function() return ty.no_grad(ty.scope, function() return f():sum():item() end) end
  end
  return { eager = looked_at(fn), compiled = looked_at(ty.compile(fn)) }
end

items[#items + 1] = { name = ("vit-forward/B%d"):format(batch), target = 0.5, rounds = 5,
  work = { f32 = batch * image }, bars = { peer = 1.3, limit = 0.75 }, peer = { "vit_forward", { batch = batch } },
  setup = function()
    local model = require("tycho.models").ViT({}, false):eval()
    local x = ty.keep(ty.randn(batch, 3, 224, 224))
    return passes(function() return model(x) end)
  end }

items[#items + 1] = { name = ("vit-step/B%d"):format(batch), target = 0.5, rounds = 3,
  work = { f32 = 3 * batch * image, update = 28 * 86567656 }, bars = { peer = 1.3, limit = 0.75 },
  peer = { "vit_step", { batch = batch } }, setup = function()
    local model = require("tycho.models").ViTForImageClassification { num_labels = 1000 }
    local x, labels = ty.keep(ty.randn(batch, 3, 224, 224)), ty.keep(ty.randint(0, 1000, { batch }))
    local opt = optim.AdamW(model:parameters(), { lr = 1e-4 })
    local function step()
      local loss = model:loss(x, labels)
      opt:step(loss)
      return loss
    end
    local function looked_at(f) return function() return ty.scope(function() return f():item() end) end end
    return { eager = looked_at(step), compiled = looked_at(ty.compile(step)) }
  end }

local texts = 16
items[#items + 1] = { name = ("clip-text/B%d"):format(texts), target = 0.5, rounds = 5,
  work = { f32 = texts * 12 * (2 * 77 * 12 * 512 * 512 + 2 * 77 * 77 * 512) }, bars = { peer = 1.3, limit = 0.75 },
  peer = { "clip_text", { batch = texts } }, setup = function()
    local model = require("tycho.models").CLIPTextModel({}):eval()
    local ids = ty.keep(ty.randint(0, 49407, { texts, 77 }))
    return passes(function() return (model(ids)) end)
  end }

for _, length in ipairs { 2048, 65536 } do
  local d, n = 1536, 16
  local function inputs()
    return { ty.randn(1, length, d), ty.rand(1, length, d) * 0.1, -ty.rand(d, n) - 0.5, ty.randn(1, length, n),
      ty.randn(1, length, n) }
  end
  local long = length > 4096
  items[#items + 1] = { name = ("selective-scan/T%d"):format(length), target = 0.2, rounds = 3,
    bars = { peer = 3 }, peer = not long and { "selective_scan", { length = length, d = d, n = n } } or nil,
    setup = function()
      local x = inputs()
      for i, t in ipairs(x) do x[i] = ty.keep(t) end
      return function()
        ty.no_grad(ty.scope, function() return ty.selective_scan(table.unpack(x)):sum():item() end)
      end
    end }
  items[#items + 1] = { name = ("selective-scan-backward/T%d"):format(length), target = 0.2, rounds = 3,
    bars = { peer = 3 }, peer = not long and { "selective_scan_backward", { length = length, d = d, n = n } } or nil,
    setup = function()
      local x = inputs()
      for i, t in ipairs(x) do x[i] = ty.keep(t):requires_grad_() end
      return function()
        ty.scope(function()
          local g = ty.grad(ty.selective_scan(table.unpack(x)):sum(), x)
          return g[1]:sum():item()
        end)
      end
    end }
end

-- Runs in a thread: the files at these places of the list are decoded.
local function serve(list)
  local io = require("tycho").io
  local bytes = {}
  for i, path in ipairs(list) do bytes[i] = io.read(path) end
  return function(first, step)
    for i = first, #bytes, step do io.decode_image(bytes[i], { channels = 3, size = { 224, 224 } }) end
    return true
  end
end

items[#items + 1] = { name = "jpeg-224", target = 0.3, bars = { peer = 1.5 }, peer = { "jpeg", {} },
  setup = function(threads)
    local folder = assert(arg[0]:match "^(.*)/bench/[^/]*$") .. "/datasets/photos"
    local list = {}
    for _, name in ipairs(ty.io.listdir(folder)) do
      if name:find "%.jpg$" then list[#list + 1] = folder .. "/" .. name end
    end
    table.sort(list)
    local workers = {}
    for i = 1, threads do workers[i] = ty.thread.new(serve, list) end
    return function()
      for i, worker in ipairs(workers) do worker:send(i, threads) end
      for _, worker in ipairs(workers) do worker:receive() end
    end
  end }

return items
