-- Fine-tuning of pipelines: folders of pictures, LoRA and all weights, the prior, what is written and read again.
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local diffusion, hub, peft = require "tycho.diffusion", require "tycho.hub", require "tycho.peft"

local finetune, lora = diffusion.finetune, diffusion.lora
local folders = check.root .. "tests/fixtures/pipelines/"

local function painter(name, length)
  local p = diffusion.TextToImage(hub.pipeline(folders .. name, { dtype = "f32" }), { warn = function() end,
    length = length })
  p.process.objective.drop = 0
  return p
end

-- Pictures of two colours, with captions in three ways.
local path = scratch.file "pictures"
ty.io.mkdir(path)
for i = 1, 3 do
  local x = ty.full({ 3, 20 + i, 24 }, 40 * i):to "u8"
  ty.io.save_image(("%s/%d.png"):format(path, i), x)
end
scratch.spit("pictures/1.txt", "  a red box\n")
scratch.spit("pictures/metadata.jsonl", '{"file_name": "2.png", "text": "a blue box"}\n')

check.test("a folder of pictures with captions", function()
  local set = finetune.folder(path, { caption = "a box", size = 16 })
  check.equal({ set.count, set.captions }, { 3, { "a red box", "a blue box", "a box" } })
  check.equal(set.picture(2).shape, { 3, 16, 16 })
  check.equal(set.picture(2):to("f32"):mean():item(), 80)
  check.fails(function() finetune.folder(path, { size = 16 }) end, "3.png: expected a caption in metadata.jsonl, in a ")
  check.fails(function() finetune.folder(scratch.file "none") end, "finetune.folder: path: expected a folder, got ")
  ty.io.mkdir(scratch.file "empty")
  check.fails(function() finetune.folder(scratch.file "empty") end, "path: expected PNG or JPEG files in ")
  scratch.spit("empty/metadata.jsonl", "{}\n")
  check.fails(function() finetune.folder(scratch.file "empty") end, "expected lines with file_name and text, got ")
end)

local set = finetune.folder(path, { caption = "a box", size = 16 })

-- The mean loss over fixed times and noises: what training is to lower.
local function measured(p, captions)
  local x, height, width = finetune.latents(p, set)
  ty.manual_seed(77)
  local told = { height = height, width = width, guidance = 3.5 }
  local sum, count = 0, 8
  ty.no_grad(function()
    for _ = 1, count do
      sum = sum + p.process.objective:loss(p.network, x, p:condition(captions or set.captions, told)):item() / count
    end
  end)
  return sum
end

for name, length in pairs { sd15 = false, sdxl = false, sd3 = 20, flux = 20, pixart = 20 } do
  check.test(name .. ": LoRA lowers the loss; written, it is read again", function()
    local p = painter(name, length or nil)
    local before = measured(p)
    local text = name == "sd15" or name == "sdxl"
    local losses = finetune.train(p, set, { steps = 25, batch = 2, lr = 2e-2, text = text, rank = 3, alpha = 6 })
    check.equal(#losses, 25)
    local after = measured(p)
    check.ok(after < before, ("%s: from %.4f to %.4f"):format(name, before, after))
    local frozen = 0
    for key, parameter in p.network:named_parameters() do
      if not key:find "lora_" and parameter.requires_grad then frozen = frozen + 1 end
    end
    check.equal(frozen, 0)

    local file = scratch.file(name .. ".safetensors")
    finetune.save(p, file)
    local again = painter(name, length or nil)
    local report = lora.load(again, file)
    check.equal(report.layers.text_encoder ~= nil, text)
    check.close(measured(again), after, 1e-5 * after)
    check.close(measured(painter(name, length or nil)), before, 1)
  end)
end

check.test("the same seed learns the same, and the generator is left as it was", function()
  local function run()
    local p = painter "sd15"
    return finetune.train(p, set, { steps = 3, lr = 1e-2, seed = 5, drop = 0.5 })
  end
  ty.manual_seed(3)
  local want = ty.rand(3):tolist()
  ty.manual_seed(3)
  local first = run()
  check.equal(ty.rand(3):tolist(), want)
  check.equal(run(), first)
end)

check.test("all weights, with pictures of the class beside", function()
  local p = painter "sd15"
  local weight = p.network.conv_in.weight:clone()
  local before, class = measured(p), { "a box", "a box", "a box" }
  local forgetful, remembers = painter "sd15", p
  -- Without a prior the class drifts towards the new pictures, with one it stays.
  local old = p:paint(class, { steps = 3, height = 16, width = 16, seed = 1 })
  local own = { count = 1, captions = { "a red box" }, picture = set.picture }
  local o = { method = "full", steps = 40, lr = 3e-3, batch = 1 }
  finetune.train(forgetful, own, o)
  o.prior = { prompt = "a box", count = 3, steps = 3, seed = 1, weight = 2 }
  local losses = finetune.train(remembers, own, o)
  check.equal(#losses, 40)
  check.ok(p.network.conv_in.weight:ne(weight):any():item(), "the weights are trained")
  check.ok(measured(p) < before)
  local function drift(painter_)
    local x = ty.no_grad(function() return painter_:encode(old) end)
    ty.manual_seed(9)
    local sum = 0
    ty.no_grad(function()
      for _ = 1, 6 do
        sum = sum + painter_.process.objective:loss(painter_.network, x, painter_:condition(class)):item()
      end
    end)
    return sum
  end
  check.ok(drift(remembers) < drift(forgetful), ("%.4f with, %.4f without"):format(drift(remembers), drift(forgetful)))
  -- The pipeline is written whole.
  hub.save_pipeline(scratch.file "trained", p.pipeline)
  local again = hub.pipeline(scratch.file "trained").components.unet
  check.equal(again.conv_in.weight:tolist(), p.network.conv_in.weight:detach():tolist())
end)

check.test("a run that was broken off goes on", function()
  local function run(more)
    local p = painter "sd15"
    local o = { steps = 4, lr = 1e-2, folder = more.folder, resume = more.resume }
    if more.steps then o.steps = more.steps end
    return finetune.train(p, set, o)
  end
  local whole = run {}
  run { folder = scratch.file "run", steps = 2 }
  local rest = run { folder = scratch.file "run", resume = true }
  check.equal(rest[1], whole[1])
  check.equal(#rest, 4)
end)

check.test("what is wrong is one clear error", function()
  local p = painter "flux"
  local function fails(text, options, other)
    check.fails(function() finetune.train(p, other or set, options) end, "finetune.train: " .. text)
  end
  fails("prior: expected a set or a prompt, got neither", { prior = {} })
  fails("set.captions: expected a list of strings, got nil", nil, {})
  fails("set: expected pictures, got none", nil, { captions = {}, picture = function() end })
  fails("set.picture(1): expected a height and a width that 4 divides, got a tensor [3, 18, 18]", nil,
    finetune.folder(path, { caption = "a box", size = 18 }))
  fails("set.picture(1): expected [3, h, w], got a tensor [1, 4]", nil,
    { captions = { "a" }, picture = function() return ty.zeros(1, 4) end })
  fails("method: expected \"lora\" or \"full\", got \"dreambooth\"", { method = "dreambooth" })
  check.fails(function() finetune.save(p, scratch.file "none.safetensors") end,
    "finetune.save: painter: expected one with adapters, as finetune.train leaves them, got none")
  peft.lora(p.network, { targets = { "to_q" } })
  check.fails(function() finetune.train(p, set) end, "the model has an adapter already")
end)

check.finish()
