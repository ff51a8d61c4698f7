--- One call of a part of Stable Diffusion 1.5 with random weights: tycho bench/lib/drawn.lua NAME prints its seconds
-- and the process's peak memory in megabytes. NAME: unet or decode.
local ty = require "tycho"
local models = require "tycho.models"

local parts = {}

function parts.unet()
  local model = models.UNet2DConditionModel { sample_size = 64, in_channels = 4, out_channels = 4,
    block_out_channels = { 320, 640, 1280, 1280 }, layers_per_block = 2, cross_attention_dim = 768,
    attention_head_dim = 8, down_block_types = { "CrossAttnDownBlock2D", "CrossAttnDownBlock2D",
      "CrossAttnDownBlock2D", "DownBlock2D" }, up_block_types = { "UpBlock2D", "CrossAttnUpBlock2D",
      "CrossAttnUpBlock2D", "CrossAttnUpBlock2D" } }
  local x, t = ty.randn { 2, 4, 64, 64 }, ty.full({ 2 }, 500.0)
  local text = { text = { embeddings = ty.randn { 2, 77, 768 } } }
  return model, function() return model(x, t, text) end
end

function parts.decode()
  local model = models.AutoencoderKL { in_channels = 3, out_channels = 3, latent_channels = 4, layers_per_block = 2,
    block_out_channels = { 128, 256, 512, 512 }, norm_num_groups = 32, sample_size = 512,
    down_block_types = { "DownEncoderBlock2D", "DownEncoderBlock2D", "DownEncoderBlock2D", "DownEncoderBlock2D" },
    up_block_types = { "UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D" } }
  local x = ty.randn { 1, 4, 64, 64 }
  return model, function() return model:decode(x) end
end

ty.manual_seed(0)
local model, call = parts[arg[1]]()
model:eval()
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
