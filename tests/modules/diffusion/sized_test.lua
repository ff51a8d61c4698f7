-- A transformer at several sizes: its own size is itself, places cover the same extent, weights are shared and copied.
local here = arg and arg[0]:match ".*/" or "tests/modules/diffusion/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local diffusion, models = require "tycho.diffusion", require "tycho.models"

local nn = ty.nn

local function network()
  ty.manual_seed(1)
  local made = models.SD3Transformer2DModel { sample_size = 4, patch_size = 1, in_channels = 2, out_channels = 2,
    num_layers = 2, attention_head_dim = 8, num_attention_heads = 2, caption_projection_dim = 16,
    joint_attention_dim = 6, pooled_projection_dim = 5, pos_embed_max_size = 4, qk_norm = "rms_norm" }
  nn.init.normal(made.proj_out.weight, 0, 0.1) -- it begins with zeros
  return made
end

local condition = { text = { embeddings = ty.randn(2, 3, 6), pooled = ty.randn(2, 5) } }
local t = ty.tensor { 300.0, 700.0 }

check.test("its own size is the network, and others have its places in between", function()
  local base = network()
  local sized = diffusion.sized(base, { 4, 8 })
  local x = ty.randn(2, 2, 4, 4)
  check.equal(sized(x, t, condition):flatten():tolist(), base(x, t, condition):flatten():tolist())
  -- Every second place of the finer grid is one of the coarse grid.
  local seen
  base.transformer_blocks[1]:register_forward_pre_hook(function(_, h) seen = h end)
  local large = ty.zeros(2, 2, 8, 8)
  sized(large, t, condition)
  local fine = seen:reshape(2, 8, 8, 16)["0, ::2, ::2"]
  base(ty.zeros(2, 2, 4, 4), t, condition)
  check.close(fine:flatten():tolist(), seen:reshape(2, 4, 4, 16)["0"]:flatten():tolist(), 1e-6)
end)

check.test("weights are one set: counted once, trained by every size, copied together", function()
  local base = network()
  local sized = diffusion.sized(base, { 4, 8 })
  check.equal(sized:count_parameters(), base:count_parameters())
  -- Parameters that get a gradient: the same ones at each size.
  local function trained(side)
    base:zero_grad()
    sized(ty.randn(2, 2, side, side), t, condition):square():sum():backward()
    local names = {}
    for name, p in base:named_parameters() do
      if p.grad then names[#names + 1] = name end
    end
    return names
  end
  check.equal(trained(8), trained(4))
  local copy = sized:clone()
  local x = ty.randn(2, 2, 8, 8)
  check.equal(copy(x, t, condition):flatten():tolist(), sized(x, t, condition):flatten():tolist())
  ty.no_grad(function() copy.network.proj_out.bias:add_(1) end)
  check.close((copy(x, t, condition) - sized(x, t, condition)):flatten():tolist(), ty.ones(2 * 2 * 64):tolist(), 1e-5)
end)

check.test("wrong arguments", function()
  local base = network()
  check.fails(function() diffusion.sized(nn.Linear(2, 2), { 4 }) end,
    "diffusion.sized: network: expected a SD3Transformer2DModel, got")
  check.fails(function() diffusion.sized(base) end, "diffusion.sized: sides: expected a list of integers >= 1, got nil")
  local sized = diffusion.sized(base, { 4, 8 })
  check.fails(function() sized(ty.randn(1, 2, 6, 6), t, condition) end, "expected squares with one of the sides")
  check.fails(function() sized(ty.randn(1, 2, 4, 8), t, condition) end, "expected squares with one of the sides")
end)

check.finish()
