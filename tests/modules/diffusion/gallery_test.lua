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

check.test("prompts of a file", function()
  local path = scratch.file "prompts.txt"
  local function write(text)
    scratch.spit("prompts.txt", text)
    return diffusion.gallery.prompts(path)
  end
  check.equal(write "\u{feff}a cat\r\n\n# no prompt\n  zw\u{f6}lf hats \n", { "a cat", "zw\u{f6}lf hats" })
  check.fails(function() write "a cat\n\na b\xe9d dog\n" end,
    "prompts.txt: line 3: expected UTF-8, got the byte 0xE9 at 4")
  check.fails(function() write "\n# nothing\n" end, "expected at least one prompt, got none")
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

local function generate(out, words, before, model)
  local command = "%s '%s' '%srecipes/diffusion/generate.lua' --threads 1 --model '%s' --out '%s' %s >'%s' 2>&1"
  command = command:format(before or "", interpreter, check.root, model or folder, scratch.file(out), words, log)
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

check.test("the recipe with LoRAs, a ControlNet, weights in blocks and a file of prompts", function()
  local fixtures = check.root .. "tests/fixtures/"
  local prompts = scratch.file "prompts.txt"
  scratch.spit("prompts.txt", "a cat\n# none\na dog\n")
  local function with(out, words)
    local ok, said = generate(out, ("--prompts '%s' --steps 2 --size 16 %s"):format(prompts, words), nil,
      fixtures .. "pipelines/sd15")
    local path = scratch.file(out) .. "/pictures/0002.png"
    return ok and ty.io.load_image(path):to "f32", said, ok and ty.io.png_text(ty.io.read(path)).prompt
  end
  local plain, said, prompt = with("as it is", "")
  check.ok(plain, said)
  check.equal(prompt, "a dog")
  local function another(out, words, least, most)
    local picture
    picture, said = with(out, words)
    local off = picture and (picture - plain):abs():mean():item() or -1
    check.ok(off > least and off < most, ("%s: %g\n%s"):format(out, off, said))
  end
  local one, two = fixtures .. "loras/sd15_kohya.safetensors", fixtures .. "loras/sd15_old.safetensors"
  another("lora", ("--lora '%s:0.5,%s'"):format(one, two), 0.5, 255)
  another("lora of none", ("--lora '%s:0,%s:0.0'"):format(one, two), -1e-9, 0.01)
  another("control", ("--control '%spipelines/control' --picture '%sdocs/digits.png'"):format(fixtures, check.root),
    0.1, 255)
  another("blocks", "--dtype q8_0", -1e-9, 6)
  check.ok(said:find("unet: weights of ", 1, true), said)
  another("both", ("--dtype q8_0 --lora '%s'"):format(one), 0.5, 255)
  local ok
  for words, what in pairs { ["--lora '" .. fixtures .. "loras/sdxl_kohya.safetensors'"] =
      "246 of 366 tensors find no layer that they fit", ["--control '" .. fixtures .. "pipelines/control'"] =
      "--picture: expected one, for --control to see, got none", ["--size abc"] = "--size: expected 512 or 768x512",
      ["--dtype q9_0"] = "expected nf4, mxfp4" } do
    ok, said = generate("wrong", "--prompt a --steps 1 " .. words, nil, fixtures .. "pipelines/sd15")
    check.equal({ ok, said:find(what, 1, true) ~= nil }, { nil, true }, said)
  end
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
