-- Painters and judges of clips: sizes, seeds, what a pipeline keeps, what training and judging take and give, errors.
local here = (arg and arg[0]:match ".*/" or "tests/modules/zoo/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local diffusion, hub, zoo = require "tycho.diffusion", require "tycho.hub", require "tycho.zoo"

local clips = zoo.clips

ty.manual_seed(1)
local painter = clips.painter { width = 24, layers = 1, inner = 24, text = 16, text_layers = 1, captions = 300,
  words = 500 }
-- A network that begins with zeros would draw the same for all words.
ty.no_grad(function()
  for _, p in ipairs(painter.network:parameters()) do p:add_(ty.randn_like(p) * 0.1) end
end)

check.test("clips go through the autoencoder frame by frame", function()
  local video = clips.set("training", { "video" }):batch({ 0, 1 }).video
  local latents = painter:encode(video)
  check.equal(latents.shape, { 2, 4, 16, 8, 8 })
  check.close(latents[1]:select(1, 5):tolist(), painter:encode(video[1]:narrow(0, 5, 1))[0]:tolist(), 1e-5)
  local again = painter:decode(latents)
  check.equal({ again.shape, again.dtype }, { { 2, 16, 3, 32, 32 }, "u8" })
  local apart = (again:to "f32" - video:to "f32"):square():mean():item()
  check.ok(10 * math.log(255 ^ 2 / apart, 10) > 25, ("%.1f"):format(apart))
end)

check.test("clips of words: their size, by themselves as in a batch, other numbers of frames", function()
  local words = { "a red star bounces off the walls", "a dog falls" }
  local both, latents = painter:paint(words, { steps = 2, guidance = 3, seed = { 4, 9 } })
  check.equal({ both.shape, both.dtype, latents.shape }, { { 2, 16, 3, 32, 32 }, "u8", { 2, 4, 16, 8, 8 } })
  local alone = painter:paint({ words[2] }, { steps = 2, guidance = 3, seed = 9 })
  check.ok((alone[0]:to "f32" - both[1]:to "f32"):abs():max():item() <= 1)
  check.ok((both[0]:to "f32" - both[1]:to "f32"):abs():max():item() > 1)
  check.equal(painter:paint(words, { steps = 1, frames = 8 }).shape, { 2, 8, 3, 32, 32 })
  local frames = clips.frames(both, 4)
  check.equal(frames.shape, { 8, 3, 32, 32 })
  check.ok(frames[7]:eq(both[1][15]):all():item() and frames[4]:eq(both[1][0]):all():item())
end)

check.test("a pipeline of clips is written and read back", function()
  local folder = os.tmpname()
  os.remove(folder)
  hub.save_pipeline(folder, painter.pipeline)
  local again = diffusion.TextToImage(hub.pipeline(folder, { dtype = "f32" }))
  local a, b = painter:paint({ "a cat spins" }, { steps = 1 }), again:paint({ "a cat spins" }, { steps = 1 })
  check.equal(b.shape, { 1, 16, 3, 32, 32 })
  check.ok((a:to "f32" - b:to "f32"):abs():max():item() <= 1)
  os.execute(("rm -r '%s'"):format(folder))
end)

check.test("what does not fit is one clear error", function()
  local words = { "a dog falls" }
  check.fails(function() painter:paint(words, { frames = 0 }) end, "frames: expected an integer >= 1, got 0")
  check.fails(function() painter:paint(words, { frames = 5 }) end, "patch_size")
  check.fails(function() painter:paint(words, { image = ty.zeros(1, 3, 32, 32) }) end,
    "image: expected nil for a network that draws clips")
  check.fails(function() zoo.canvas.painter({ widths = { 8, 8 }, text = 16 }):paint(words, { frames = 8 }) end,
    "frames: expected nil for a network that draws single pictures, got 8")
  local options = painter.pipeline.options
  painter.pipeline.options = { num_frames = 1.5, height = 32, width = 32 }
  check.fails(function() painter:paint(words) end, "pipeline.options.num_frames: expected an integer >= 1, got 1.5")
  painter.pipeline.options = options
  check.fails(function() painter:encode(ty.zeros(3, 32, 32)) end, "expected %[n, 3, h, w%] or %[n, frames, 3, h, w%]")
  check.fails(function() painter:decode(ty.zeros(4, 8, 8)) end, "TextToImage:decode: latents: expected")
  check.fails(function() clips.painter { layers = 0 } end, "layers: expected an integer >= 1, got 0")
  check.fails(function() clips.set("validaton", { "video" }) end, "validation")
end)

check.test("a judge is trained, and shares are counted by law", function()
  local judge = clips.train_judge(clips.judge_network { 8, 8 }, { steps = 2, batch = 4 })
  local drawn, real, video = clips.measure(painter, judge, "validation", 6, { steps = 1, first = 3 })
  check.equal(video.shape, { 6, 16, 3, 32, 32 })
  local batch = clips.set("validation", { "video", "law" }):batch(ty.arange(3, 9))
  local seen = clips.see(judge, batch.video)
  check.close(real.law, seen:eq(batch.law):to("f32"):mean():item(), 1e-6)
  check.ok(drawn.law >= 0 and drawn.law <= 1)
end)

check.finish()
