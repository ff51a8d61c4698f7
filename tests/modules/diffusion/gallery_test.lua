-- Pictures as files: batches, seeds, what stands in them, Ctrl-C; recipes/diffusion/generate.lua on a folder as
-- diffusers writes it.
local here = (arg and arg[0]:match ".*/" or "tests/modules/diffusion/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local diffusion, hub, models = require "tycho.diffusion", require "tycho.hub", require "tycho.models"

local root = check.root .. "tests/fixtures/"
local clip = ty.tokenizer.load(root .. "tokenizers/clip.json")
ty.tokenizer.fields(clip).max_length, ty.tokenizer.fields(clip).pad = 7, 1
ty.manual_seed(4)
local unet = hub.load(root .. "diffusers/unet_sd1", { dtype = "f32" })
local pipeline = { class = "StableDiffusionPipeline", components = { unet = unet,
  vae = hub.load(root .. "diffusers/autoencoder", { dtype = "f32" }), tokenizer = clip,
  text_encoder = models.CLIPTextModel { vocab_size = 1200, hidden_size = unet.context, intermediate_size = 16,
    num_hidden_layers = 1, num_attention_heads = 2, max_position_embeddings = 7, eos_token_id = 1 }:eval(),
  scheduler = { _class_name = "DDIMScheduler", beta_schedule = "scaled_linear", clip_sample = false } } }
local painter = diffusion.TextToImage(pipeline)

check.test("files of prompts, with what they were made with", function()
  local told = {}
  local files, interrupted = diffusion.gallery.paint(painter, { "a cat", "two" }, scratch.file "some", { each = 2,
    batch = 3, steps = 2, seed = 5, negative = "the text", guidance = 3, sampler = "ddim", model = "tiny",
    on_progress = function(done, all) told[#told + 1] = done .. "/" .. all end })
  check.equal({ #files, interrupted, told }, { 4, false, { "1/4", "2/4", "3/4", "4/4" } })
  for i, path in ipairs(files) do
    local text = ty.io.png_text(ty.io.read(path))
    local prompt, seed = i < 3 and "a cat" or "two", 4 + i
    check.equal({ text.prompt, text.seed, text.parameters }, { prompt, tostring(seed), prompt
      .. "\nNegative prompt: the text\nSteps: 2, Sampler: ddim, CFG scale: 3, Seed: " .. seed
      .. ", Size: 16x16, Model: tiny" })
    local alone = painter:paint({ prompt }, { steps = 2, seed = seed, negative = "the text", guidance = 3 })
    check.ok((ty.io.load_image(path):to "f32" - alone:select(0, 0):to "f32"):abs():max():item() <= 1)
  end
end)

check.test("what is ready stays when it is interrupted; other errors pass", function()
  local function paint(problem)
    return diffusion.gallery.paint(painter, { "a", "b", "c" }, scratch.file "cut", { steps = 2, batch = 1,
      on_progress = function(done) if done == 5 then error(problem, 0) end end })
  end
  local files, interrupted = paint "add: interrupted"
  check.equal({ #files, interrupted, ty.io.exists(files[2]) }, { 2, true, true })
  check.fails(function() paint "broken" end, "broken")
  check.fails(function() diffusion.gallery.paint(painter, {}, scratch.file "none") end,
    "expected at least one, got none")
end)

local interpreter
do
  local first = 0
  while arg[first - 1] do first = first - 1 end
  interpreter = arg[first]
end
local folder = scratch.file "pipeline"
hub.save_pipeline(folder, pipeline)
local log = scratch.file "log"

local function generate(out, words, before)
  local command = "%s '%s' '%srecipes/diffusion/generate.lua' --threads 1 --model '%s' --out '%s' %s >'%s' 2>&1"
  command = command:format(before or "", interpreter, check.root, folder, scratch.file(out), words, log)
  return os.execute(command), ty.io.exists(log) and ty.io.read(log)
end

check.test("the recipe, on a folder as diffusers writes it", function()
  local ok, said = generate("plain",
    "--prompt 'a cat|two' --steps 3 --scheduler unipc --seed 3 --size 24x16 --dtype f32")
  check.equal(ok, true, said)
  local path = scratch.file "plain" .. "/pictures/0002.png"
  local text = ty.io.png_text(ty.io.read(path))
  check.equal({ text.prompt, text.seed, text.sampler, { ty.io.image_size(ty.io.read(path)) } },
    { "two", "4", "unipc", { 3, 16, 24 } })
  for _, row in ipairs(ty.io.load_json(scratch.file "plain" .. "/metrics.json").table) do
    check.equal(row.pass, true, row.claim)
  end
  ok, said = generate("changed", ("--prompt a --steps 4 --image '%s' --strength 0.5"):format(path))
  check.equal(ok, true, said)
  ok, said = generate("wrong", "--scheduler dpm9")
  check.equal({ ok, said:find("name: expected one of ddim", 1, true) ~= nil }, { nil, true })
end)

check.test("Ctrl-C ends it with what is ready", function()
  if not os.execute "timeout 5 true" then return end
  local said
  for _, seconds in ipairs { 2, 8, 30 } do -- until the first picture is ready, on however busy a machine
    said = select(2, generate("stopped", "--prompt a --steps 1 --batch 1 --each 50000",
      ("timeout --foreground -s INT %d"):format(seconds)))
    if ty.io.exists(scratch.file "stopped" .. "/metrics.json") then break end
  end
  check.ok(said:find(", interrupted: ", 1, true) ~= nil, said)
  check.ok(ty.io.exists(scratch.file "stopped" .. "/pictures/0001.png"))
  local rows = ty.io.load_json(scratch.file "stopped" .. "/metrics.json").table
  check.ok(rows[1].measured > 0 and rows[1].measured < 1)
end)

check.finish()
