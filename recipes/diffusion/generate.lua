-- Pictures from words
-- claim: a picture depends on its prompt and its seed alone: by itself it is the same as in a batch
-- system: latent diffusion and flow models, published weights
-- paper: Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models"; Ho and Salimans 2022,
--   "Classifier-Free Guidance"
-- time: as the model; seconds without --model, with a small untrained one
--
-- The model is a folder as diffusers writes it, or one of the zoo by its name. Every picture goes into the results as a
-- PNG that says what it was made with; Ctrl-C ends with those that are ready. With --image the picture is changed, with
-- --mask a part of it is painted anew.
local ty = require "tycho"
local diffusion = require "tycho.diffusion"
local hub = require "tycho.hub"
local models = require "tycho.models"
local quant = require "tycho.quant"
local zoo = require "tycho.zoo"

local r = ty.recipe.declare {
  args = {
    { "model", "", "a folder with model_index.json, or a name of the zoo (none: a small untrained model)" },
    { "prompt", "two red apples|a fox", "what to paint; several, with | between" },
    { "prompts", "", "a file of prompts instead, one a line" },
    { "negative", "", "what to stay away from" },
    { "each", 1, "pictures of each prompt, with seeds that count up from --seed", least = 1 },
    { "steps", 20, "of the sampler", quick = 2, least = 1 },
    { "scheduler", "", "ddim, euler, euler_a, heun, dpmpp_2m_karras, dpmpp_2m_sde, unipc ... (none: the model's own)" },
    { "guidance", 4.0, "scale of classifier-free guidance (1: none)" },
    { "rescale", 0.0, "share of the way back to the plain prediction's deviation (Lin et al. 2024)" },
    { "size", "", "of the pictures, 512 or 768x512, width first (none: what the model was trained for)" },
    { "image", "", "a picture to change" },
    { "mask", "", "white where something new comes; the rest of --image stays" },
    { "strength", 0.0, "how much of the way is gone anew, 0 to 1 (0: 0.8, with a mask 1)" },
    { "words", {}, "files of embeddings that were learnt (textual inversion)" },
    { "lora", {}, "files of LoRA, each with a strength if not 1: style.safetensors:0.8,detail.safetensors" },
    { "control", "", "folder of a ControlNet, which sees --picture" },
    { "picture", "", "what the ControlNet sees: edges, depth ..." },
    { "control_strength", 1.0, "of the ControlNet" },
    { "batch", 4, "pictures at a time", least = 1 },
    { "dtype", "", "convert the weights: f32, bf16, f16; q8_0, q4_0 (of linear layers)" },
  },
}
local args = r.args
local BLOCKS = args.dtype:find "^[qn]%w+" ~= nil -- formats of quant, which has linear layers in them
local DTYPE = BLOCKS and "f32" or args.dtype ~= "" and args.dtype or nil

-- An untrained U-Net between the zoo's autoencoder and tokenizer: noise, but all of the way to a picture.
local function untrained()
  local tokenizer = zoo.tokenizer "scene-clip"
  ty.tokenizer.fields(tokenizer).max_length = 16
  local vae = zoo.load("scene-vae", { device = r.device })
  local channels = vae.config.latent_channels
  return r:place(function()
    return { components = { tokenizer = tokenizer, vae = vae,
      unet = models.UNet2DConditionModel { sample_size = 8, in_channels = channels, out_channels = channels,
        block_out_channels = { 16, 32 }, layers_per_block = 1, cross_attention_dim = 32, attention_head_dim = 2,
        down_block_types = { "CrossAttnDownBlock2D", "DownBlock2D" }, norm_num_groups = 8,
        up_block_types = { "UpBlock2D", "CrossAttnUpBlock2D" } }:eval(),
      text_encoder = models.CLIPTextModel { vocab_size = 8192, hidden_size = 32, intermediate_size = 64,
        num_hidden_layers = 1, num_attention_heads = 2, max_position_embeddings = 16 }:eval(),
      scheduler = { _class_name = "DDIMScheduler", beta_schedule = "scaled_linear", beta_start = 0.00085,
        beta_end = 0.012, clip_sample = false } } }
  end)
end

local function load(path)
  if path == "" then return untrained() end
  local options = { device = r.device, dtype = DTYPE }
  if path:find "/" or ty.io.exists(path) then return hub.pipeline(path, options) end
  return zoo.load(path, options)
end

local painter = diffusion.TextToImage(load(args.model))
for name, model in pairs(BLOCKS and painter.pipeline.components or {}) do
  if ty.nn.is_module(model) and name ~= "vae" then
    local report = quant.quantize(model, { dtype = args.dtype })
    r:say("%s: weights of %d layers in %s, %.1f MB", name, report.modules, args.dtype, report.bytes / 1e6)
  end
end
if args.scheduler ~= "" then painter:use(args.scheduler) end
for _, path in ipairs(args.words) do r:say("the word %s", diffusion.inversion.load(painter, path)) end

for _, file in ipairs(args.lora) do
  local path, strength = file:match "^(.*):([%d.-]+)$"
  local report = diffusion.lora.load(painter, path or file, { strength = tonumber(strength) or 1 })
  for component, layers in pairs(report.layers) do r:say("LoRA %s: %d layers of %s", report.name, layers, component) end
end

local prompts = args.prompts ~= "" and diffusion.gallery.prompts(args.prompts) or {}
for prompt in (args.prompt .. "|"):gmatch "(.-)|" do
  if prompt ~= "" and args.prompts == "" then prompts[#prompts + 1] = prompt end
end
local width, height = args.size:match "^(%d+)x(%d+)$"
width, height = math.tointeger(tonumber(width or args.size)), math.tointeger(tonumber(height or args.size))
if args.size ~= "" and not (width and height) then
  error(("generate: --size: expected 512 or 768x512, got %s"):format(args.size), 0)
end

-- A picture of a file, in the size asked for.
local function read(path, channels)
  if path == "" then return nil end
  local size = height and { height, width } or nil
  return ty.io.load_image(path, { channels = channels, size = size }):unsqueeze(0)
end
local image, mask, control = read(args.image, 3), read(args.mask, 1), nil
if args.control ~= "" then
  local net = hub.load(args.control, { device = r.device, dtype = DTYPE })
  if args.picture == "" then error("generate: --picture: expected one, for --control to see, got none", 0) end
  control = { { net = net, picture = read(args.picture, net.config.conditioning_channels),
    strength = args.control_strength } }
end

local function options_of(more)
  local o = { steps = args.steps, guidance = args.guidance, rescale = args.rescale, negative = args.negative,
    seed = r.seed, width = width, height = height, image = image, mask = mask and mask:to "f32" / 255,
    strength = args.strength > 0 and args.strength or nil, controls = control }
  for key, value in pairs(more) do o[key] = value end
  return o
end

local began, batches = r:seconds(), (#prompts * args.each + args.batch - 1) // args.batch
local progress = ty.train.progress(batches * args.steps, { title = "painting" })
local files, interrupted = diffusion.gallery.paint(painter, prompts, r:path "pictures", options_of { each = args.each,
  batch = args.batch, model = args.model, sampler = args.scheduler ~= "" and args.scheduler
    or painter.scheduler._class_name,
  on_progress = function(done) progress:advance(done) end })
progress:finish()
local seconds = r:seconds() - began
r:say("%d of %d pictures in %.1f s%s: %s", #files, #prompts * args.each, seconds, interrupted and ", interrupted" or "",
  r:path "pictures")
r.metrics.seconds_each = #files > 0 and seconds / #files or nil

-- The last picture once more, by itself.
local alone
if not interrupted then
  alone = painter:paint({ prompts[#prompts] }, options_of { seed = r.seed + #files - 1 }):select(0, 0):to "f32"
  alone = (alone:to "cpu" - ty.io.load_image(files[#files]):to "f32"):abs():max():item()
end
os.exit(r:finish {
  { claim = "pictures that are ready, of those asked for", measured = #files / (#prompts * args.each), bar = 1.0 },
  { claim = "largest difference of a picture to itself without the batch, in grey levels",
    measured = alone or "interrupted", bar = 1, below = true, judged = alone ~= nil },
}, true)
