--- One call of a part of Stable Diffusion 1.5 with random weights: tycho bench/lib/drawn.lua NAME DTYPE prints its
-- seconds and the process's peak memory in megabytes. NAME: unet or decode; DTYPE: of the weights, f32, f16, or q8_0
-- for those of linear layers.
local ty = require "tycho"
local models, quant = require "tycho.models", require "tycho.quant"

local name, dtype = arg[1], arg[2] or "f32"
local float = dtype == "f16" and "f16" or "f32" -- of what is not in blocks
local parts = {}

function parts.unet()
  local model = models.UNet2DConditionModel { sample_size = 64, in_channels = 4, out_channels = 4,
    block_out_channels = { 320, 640, 1280, 1280 }, layers_per_block = 2, cross_attention_dim = 768,
    attention_head_dim = 8, down_block_types = { "CrossAttnDownBlock2D", "CrossAttnDownBlock2D",
      "CrossAttnDownBlock2D", "DownBlock2D" }, up_block_types = { "UpBlock2D", "CrossAttnUpBlock2D",
      "CrossAttnUpBlock2D", "CrossAttnUpBlock2D" } }
  local x, t = ty.randn({ 2, 4, 64, 64 }):to(float), ty.full({ 2 }, 500.0)
  local text = { text = { embeddings = ty.randn({ 2, 77, 768 }):to(float) } }
  return model, function() return model(x, t, text) end
end

function parts.decode()
  local model = models.AutoencoderKL { in_channels = 3, out_channels = 3, latent_channels = 4, layers_per_block = 2,
    block_out_channels = { 128, 256, 512, 512 }, norm_num_groups = 32, sample_size = 512,
    down_block_types = { "DownEncoderBlock2D", "DownEncoderBlock2D", "DownEncoderBlock2D", "DownEncoderBlock2D" },
    up_block_types = { "UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D" } }
  local x = ty.randn({ 1, 4, 64, 64 }):to(float)
  return model, function() return model:decode(x) end
end

ty.manual_seed(0)
local model, call = parts[name]()
model:eval():to(float)
if dtype == "q8_0" then quant.quantize(model, { dtype = "q8_0" }) end
local seconds
for _ = 1, 2 do
  local began = ty.system.clock()
  ty.no_grad(ty.scope, function() return call():sum():item() end)
  seconds = ty.system.clock() - began
end
local peak
for line in io.lines "/proc/self/status" do peak = line:match "^VmHWM:%s*(%d+)" or peak end
io.stderr:write(("%d parameters\n"):format(model:count_parameters()))
print(seconds, tonumber(peak) / 1024)
