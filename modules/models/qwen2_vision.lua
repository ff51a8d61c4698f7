--- The networks of pictures of Qwen2-VL and Qwen2.5-VL: patches of any number of rows and columns with rotary positions
-- of both, and a merger that makes one feature of 2 x 2 neighbours. Wang et al. 2024, "Qwen2-VL: Enhancing
-- Vision-Language Model's Perception of the World at Any Resolution"; with attention in windows in most layers: Bai et
-- al. 2025, "Qwen2.5-VL Technical Report". Parameter names of transformers.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local configs = require "tycho.models.config"
local layers = require "tycho.models.layers"

local nn = ty.nn
local parameter = require("tycho.nn.options").parameter
local M = {}

local EPS = 1e-6 -- of all norms, in no config

-- ---- parts ----

-- A convolution whose steps are its kernel's size, of patches that are apart already.
local Projection = nn.module "QwenPatchProjection"

function Projection:init(config)
  local size, frames = config.patch_size, config.temporal_patch_size
  self.weight = parameter({ config.width, config.in_channels, frames, size, size },
    function(w) nn.init.normal(w, 0, config.initializer_range) end)
end

-- [n, channels * frames * size * size] to [n, width].
function Projection:forward(x) return ty.linear(x, self.weight:flatten(1)) end

local Patches = nn.module "QwenPatchEmbed"

function Patches:init(config) self.proj = Projection(config) end

function Patches:forward(x) return self.proj(x) end

local Attention = nn.module "QwenVisionAttention"

function Attention:init(config)
  self.heads = config.num_heads
  self.qkv = layers.linear(config.width, 3 * config.width, true, config.initializer_range)
  self.proj = layers.linear(config.width, config.width, true, config.initializer_range)
end

-- x [n, width]; cu_seqlens: where those that see each other begin and end.
function Attention:forward(x, at, cu_seqlens)
  local n, width = x.shape[1], x.shape[2]
  local all = self.qkv(x):reshape(1, n, 3, self.heads, width // self.heads):permute(2, 0, 3, 1, 4)
  local q, k = ty.rotary(all[0], at.cos, at.sin), ty.rotary(all[1], at.cos, at.sin)
  local y = nn.attention(q, k, all[2], { cu_seqlens = cu_seqlens })
  return self.proj(y:squeeze(0))
end

local Mlp = nn.module "QwenVisionMlp"

function Mlp:init(config)
  self.fc1 = layers.linear(config.width, config.inner, true, config.initializer_range)
  self.fc2 = layers.linear(config.inner, config.width, true, config.initializer_range)
  self.activation = layers.activation("Qwen2VL", config, "hidden_act")
end

function Mlp:forward(x) return self.fc2(layers.activated(self.fc1, x, self.activation)) end

local function norm_of(config)
  if config.windowed then return nn.RMSNorm(config.width, { eps = EPS }) end
  return nn.LayerNorm(config.width, { eps = EPS })
end

local Block = nn.module "QwenVisionBlock"

function Block:init(config)
  self.norm1, self.norm2 = norm_of(config), norm_of(config)
  self.attn = Attention(config)
  self.mlp = config.windowed and layers.GatedMlp(config.width, config.inner,
    configs.activation("Qwen2_5_VL", config.hidden_act, "hidden_act"), true) or Mlp(config)
end

function Block:forward(x, at, cu_seqlens)
  x = x + self.attn(self.norm1(x), at, cu_seqlens)
  return x + self.mlp(self.norm2(x))
end

local Merger = nn.module "QwenPatchMerger"

function Merger:init(config)
  self.width = config.width * config.spatial_merge_size * config.spatial_merge_size
  self.ln_q = norm_of(config)
  self.mlp = nn.ModuleList { layers.linear(self.width, self.width, true, config.initializer_range), nn.GELU(),
    layers.linear(self.width, config.out, true, config.initializer_range) }
end

function Merger:forward(x)
  x = self.ln_q(x):reshape(-1, self.width)
  return self.mlp[3](self.mlp[1](x, nil, "gelu"))
end

-- ---- places ----

-- Row and column of each patch of a picture of rows x columns patches, those that are merged one after the other.
local function places(rows, columns, merge)
  local high, wide = rows // merge, columns // merge
  local y = ty.arange(rows):reshape(high, 1, merge, 1):expand(high, wide, merge, merge)
  local x = ty.arange(columns):reshape(1, wide, 1, merge):expand(high, wide, merge, merge)
  return y:flatten(), x:flatten()
end

-- The merged places of a picture in the order of windows of `side` x `side`, and how many each window has.
local function windows(frames, rows, columns, side)
  local order, counts = {}, {}
  for t = 0, frames - 1 do
    for top = 0, rows - 1, side do
      for left = 0, columns - 1, side do
        local count = 0
        for y = top, math.min(top + side, rows) - 1 do
          for x = left, math.min(left + side, columns) - 1 do
            order[#order + 1], count = (t * rows + y) * columns + x, count + 1
          end
        end
        counts[#counts + 1] = count
      end
    end
  end
  return order, counts
end

-- What a list of grids { frames, rows, columns } asks for: angles of the patches, where frames begin and end, and with
-- windows the order that brings windows together and where they begin and end.
local function layout(config, grids, device)
  local merge, ys, xs, frames = config.spatial_merge_size, {}, {}, { 0 }
  local order, inner, base = {}, { 0 }, 0
  for _, grid in ipairs(grids) do
    local y, x = places(grid[2], grid[3], merge)
    for _ = 1, grid[1] do
      ys[#ys + 1], xs[#xs + 1] = y, x
      frames[#frames + 1] = frames[#frames] + grid[2] * grid[3]
    end
    if config.windowed then
      local rows, columns = grid[2] // merge, grid[3] // merge
      local list, counts = windows(grid[1], rows, columns, config.window_size // merge // config.patch_size)
      for _, place in ipairs(list) do order[#order + 1] = base + place end
      for _, count in ipairs(counts) do inner[#inner + 1] = inner[#inner] + count * merge * merge end
      base = base + grid[1] * rows * columns
    end
  end
  local quarter = config.width // config.num_heads // 4
  local rates = ((ty.arange(quarter):to "f64" / quarter) * -math.log(config.rope_theta)):exp()
  local angles = ty.concat({ ty.concat(ys, 0):to("f64"):unsqueeze(1) * rates, ty.concat(xs, 0):to("f64"):unsqueeze(1)
    * rates }, 1)
  local function integers(list) return ty.tensor(list, { dtype = "i64" }):to { device = device } end
  local at = { frames = integers(frames), angles = angles }
  if config.windowed then at.order, at.windows = integers(order), integers(inner) end
  return at
end

-- Rows of x in groups of `unit`, the groups in another order.
local function reordered(x, order, unit)
  if not order then return x end
  return x:reshape(-1, unit, x.shape[2]):index_select(0, order):reshape(x.shape[1], x.shape[2])
end

-- ---- the tower ----

--- Patches of pictures of any size to one feature for each 2 x 2 of them.
---@class QwenVision: Module
local Vision = nn.module "QwenVision"
M.Vision = Vision

local common = { depth = { "few", 32 }, num_heads = { "count", 16 }, in_channels = { "count", configs.none },
  in_chans = { "count", configs.none }, patch_size = { "count", 14 }, spatial_merge_size = { "count", 2 },
  temporal_patch_size = { "count", 2 }, initializer_range = { "number", 0.02 }, rope_parameters = { "table", {} },
  spatial_patch_size = { "count", configs.none }, tokens_per_second = { "number", 4 } }

local plain = { embed_dim = { "count", 1280 }, hidden_size = { "count", 3584 }, hidden_act = { "text", "quick_gelu" },
  mlp_ratio = { "number", 4 } }
local windowed = { hidden_size = { "count", 3584 }, hidden_act = { "text", "silu" },
  intermediate_size = { "count", 3420 }, window_size = { "count", 112 }, out_hidden_size = { "count", 3584 },
  fullatt_block_indexes = { "places", { 7, 15, 23, 31 } } }

--- given: the keys of vision_config; windows: as Qwen2.5-VL has it.
---@param who string
---@param given table
---@param windows_too boolean
function Vision:init(who, given, windows_too)
  local fields = {}
  for name, field in pairs(common) do fields[name] = field end
  for name, field in pairs(windows_too and windowed or plain) do fields[name] = field end
  local config = configs.read(who .. ": vision_config", given, fields)
  config.in_channels = config.in_channels or config.in_chans or 3
  self.published = config
  -- What both call by different names.
  local own = { windowed = windows_too, width = windows_too and config.hidden_size or config.embed_dim,
    out = windows_too and config.out_hidden_size or config.hidden_size,
    rope_theta = config.rope_parameters.rope_theta or 10000 }
  own.inner = windows_too and config.intermediate_size or math.tointeger(own.width * config.mlp_ratio // 1)
  for _, key in ipairs { "depth", "num_heads", "in_channels", "patch_size", "spatial_merge_size", "hidden_act",
    "temporal_patch_size", "initializer_range", "window_size" } do own[key] = config[key] end
  if own.width % own.num_heads ~= 0 or own.width // own.num_heads % 4 ~= 0 then
    error(("%s: vision_config: num_heads %d must divide the width %d into multiples of 4"):format(who, own.num_heads,
      own.width), 0)
  elseif own.inner < 1 then
    error(("%s: vision_config: mlp_ratio leaves the feed-forward network no width"):format(who), 0)
  elseif windows_too and own.window_size // own.spatial_merge_size // own.patch_size < 1 then
    error(("%s: vision_config: window_size %d has no room for %d patches of %d"):format(who, own.window_size,
      own.spatial_merge_size, own.patch_size), 0)
  end
  self.config, self.full = own, {}
  for _, i in ipairs(windows_too and config.fullatt_block_indexes or {}) do self.full[i + 1] = true end
  self.patch_embed = Patches(own)
  self.blocks = nn.ModuleList {}
  for _ = 1, own.depth do self.blocks:append(Block(own)) end
  self.merger = Merger(own)
end

--- Lists { frames, rows, columns } of grids i64 [m, 3] that the tower can have, or an error. name: of the option, for
-- errors ("sizes").
---@param who string
---@param grids Tensor
---@param name? string
---@return integer[][]
function Vision:grids(who, grids, name)
  name = name or "sizes"
  if not ty.is_tensor(grids) or grids.ndim ~= 2 or grids.shape[2] ~= 3 or grids.dtype ~= "i64" then
    arguments.fail("%s: %s: expected i64 [%s, 3], frames, rows and columns of patches, got %s", who, name,
      name == "sizes" and "pictures" or "clips",
      arguments.describe(grids))
  end
  local list, merge = grids:tolist(), self.config.spatial_merge_size
  for i, grid in ipairs(list) do
    if grid[1] < 1 or grid[2] < merge or grid[3] < merge or grid[2] % merge ~= 0 or grid[3] % merge ~= 0
      or math.max(grid[1], grid[2], grid[3]) > 1 << 16 then
      arguments.fail("%s: %s: expected rows and columns in multiples of %d, got %d x %d as number %d", who, name,
        merge, grid[2], grid[3], i)
    end
  end
  return list
end

--- Features [all merged places, out] of patches [n, channels * frames * size * size] of pictures one after another,
-- whose grids are a list { frames, rows, columns } of patches.
---@param x Tensor
---@param grids integer[][]
---@param checkpoint? boolean
---@return Tensor
function Vision:forward(x, grids, checkpoint)
  local config, count = self.config, 0
  for _, grid in ipairs(grids) do count = count + grid[1] * grid[2] * grid[3] end
  local width = config.in_channels * config.temporal_patch_size * config.patch_size * config.patch_size
  if not ty.is_tensor(x) or x.ndim ~= 2 or x.shape[1] ~= count or x.shape[2] ~= width then
    arguments.fail("QwenVision: pictures: expected the %d patches of these sizes, [%d, %d], got %s", count, count,
      width, arguments.describe(x))
  end
  local weight = self.patch_embed.proj.weight
  local at = layout(config, grids, weight.device)
  local unit = config.spatial_merge_size * config.spatial_merge_size
  x = reordered(self.patch_embed(x:to(weight.dtype)), at.order, unit)
  local angles = reordered(at.angles:to { device = weight.device }, at.order, unit)
  local turns = { cos = angles:cos():to(weight.dtype), sin = angles:sin():to(weight.dtype) }
  for i, block in ipairs(self.blocks) do
    local cu_seqlens = at.windows and not self.full[i] and at.windows or at.frames
    if checkpoint then x = ty.checkpoint(block, x, turns, cu_seqlens) else x = block(x, turns, cu_seqlens) end
  end
  x = self.merger(x)
  if not at.order then return x end
  return x:index_select(0, at.order:argsort())
end

return M
