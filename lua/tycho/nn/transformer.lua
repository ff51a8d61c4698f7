--- The transformer's decoder layer and stacks of layers, with PyTorch's parameter names. Vaswani et al. 2017.
local ty = require "tycho"
local attention = require "tycho.nn.attention"
local base = require "tycho.nn.module"
local containers = require "tycho.nn.containers"
local layers = require "tycho.nn.layers"
local masks = require "tycho.nn.masks"
local norms = require "tycho.nn.norms"
local options = require "tycho.nn.options"

local define = base.define
local M = {}

local layer_defaults = { feedforward = 2048, dropout = 0.1, activation = "relu", norm_first = false, eps = 1e-5,
  batch_first = true }
local layer_kinds = { feedforward = "an integer >= 1", dropout = "a number in [0, 1]",
  activation = '"relu" or "gelu"', eps = "a finite number >= 0" }

--- Self-attention, attention to a memory and a feed-forward network with residuals; x [b, t, width], memory [b, s,
-- width]. options: feedforward (2048), dropout (0.1), activation ("relu" or "gelu"), norm_first (false), eps (1e-5),
-- batch_first (true, and nothing else).
---@overload fun(width: integer, heads: integer, options?: table): Module
local TransformerDecoderLayer = define "TransformerDecoderLayer"
M.TransformerDecoderLayer = TransformerDecoderLayer

function TransformerDecoderLayer:init(width, heads, given)
  local o = options.read("TransformerDecoderLayer", given, layer_defaults, layer_kinds)
  options.batch_first("TransformerDecoderLayer", o)
  self.self_attn = attention.MultiheadAttention(width, heads, { dropout = o.dropout })
  self.multihead_attn = attention.MultiheadAttention(width, heads, { dropout = o.dropout })
  self.linear1 = layers.Linear(width, o.feedforward)
  self.dropout = layers.Dropout(o.dropout)
  self.linear2 = layers.Linear(o.feedforward, width)
  for i = 1, 3 do self["norm" .. i] = norms.LayerNorm(width, { eps = o.eps }) end
  self.norm_first = o.norm_first
  self.activation = ty[o.activation]
end

local call_defaults, call_kinds = { causal = false, tgt_is_causal = false }, { causal = "a boolean" }
for name in ("mask memory_mask tgt_mask tgt_key_padding_mask memory_key_padding_mask"):gmatch "%S+" do
  call_defaults[name], call_kinds[name] = options.none, "a tensor"
end

--- options: mask and causal for x, memory_mask for the memory, as MultiheadAttention's mask (true: seen); PyTorch's
-- tgt_mask, tgt_is_causal, tgt_key_padding_mask and memory_key_padding_mask (true: left out).
function TransformerDecoderLayer:forward(x, memory, given)
  local o = options.read("TransformerDecoderLayer", given, call_defaults, call_kinds)
  local own = { mask = o.mask, causal = o.causal or o.tgt_is_causal, attn_mask = o.tgt_mask,
    key_padding_mask = o.tgt_key_padding_mask }
  local others = { mask = o.memory_mask, key_padding_mask = o.memory_key_padding_mask }
  options.expect("TransformerDecoderLayer", "memory", memory, "a tensor")
  local parts = {
    function(h) return self.dropout((self.self_attn(h, own))) end,
    function(h) return self.dropout((self.multihead_attn(h, memory, memory, others))) end,
    function(h) return self.dropout(self.linear2(self.dropout(self.activation(self.linear1(h))))) end,
  }
  for i, part in ipairs(parts) do
    local norm = self["norm" .. i]
    if self.norm_first then x = x + part(norm(x)) else x = norm(x + part(x)) end
  end
  return x
end

local function stack(self, who, layer, count, given)
  local o = options.read(who, given, { norm = options.none }, { norm = "a module" })
  options.expect(who, "layer", layer, "a module")
  options.expect(who, "count", count, "an integer in [1, 10000]")
  self.layers = containers.ModuleList()
  for _ = 1, count do self.layers:append(layer:clone()) end
  if o.norm then self.norm = o.norm end
end

local function describe(self) return ("%d layers"):format(#self.layers) end

--- `count` copies of an encoder layer, one after the other. options: norm (a module for the end).
---@overload fun(layer: Module, count: integer, options?: table): Module
local TransformerEncoder = define "TransformerEncoder"
M.TransformerEncoder = TransformerEncoder

function TransformerEncoder:init(layer, count, given) stack(self, "TransformerEncoder", layer, count, given) end

--- options: those of the layers.
function TransformerEncoder:forward(x, given)
  for _, layer in ipairs(self.layers) do x = layer(x, given) end
  return self.norm and self.norm(x) or x
end

TransformerEncoder.describe = describe

--- `count` copies of a decoder layer, one after the other. options: norm (a module for the end).
---@overload fun(layer: Module, count: integer, options?: table): Module
local TransformerDecoder = define "TransformerDecoder"
M.TransformerDecoder = TransformerDecoder

function TransformerDecoder:init(layer, count, given) stack(self, "TransformerDecoder", layer, count, given) end

--- options: those of the layers.
function TransformerDecoder:forward(x, memory, given)
  for _, layer in ipairs(self.layers) do x = layer(x, memory, given) end
  return self.norm and self.norm(x) or x
end

TransformerDecoder.describe = describe

--- Encoder and decoder: model(source [b, s, width], target [b, t, width]) gives [b, t, width].
-- options: encoder_layers (6), decoder_layers (6), and those of TransformerEncoderLayer.
---@overload fun(width: integer, heads: integer, options?: table): Module
local Transformer = define "Transformer"
M.Transformer = Transformer

function Transformer:init(width, heads, given)
  local defaults, kinds = { encoder_layers = 6, decoder_layers = 6 }, {
    encoder_layers = "an integer >= 1", decoder_layers = "an integer >= 1" }
  for name, value in pairs(layer_defaults) do defaults[name], kinds[name] = value, layer_kinds[name] end
  local o, own = options.read("Transformer", given, defaults, kinds), {}
  for name in pairs(layer_defaults) do own[name] = o[name] end
  self.encoder = TransformerEncoder(attention.TransformerEncoderLayer(width, heads, own), o.encoder_layers,
    { norm = norms.LayerNorm(width, { eps = o.eps }) })
  self.decoder = TransformerDecoder(TransformerDecoderLayer(width, heads, own), o.decoder_layers,
    { norm = norms.LayerNorm(width, { eps = o.eps }) })
end

local whole_defaults, whole_kinds = {}, {}
for name, value in pairs(call_defaults) do whole_defaults[name], whole_kinds[name] = value, call_kinds[name] end
for name in ("source_mask src_mask src_key_padding_mask"):gmatch "%S+" do
  whole_defaults[name], whole_kinds[name] = options.none, "a tensor"
end

--- options: source_mask (true: seen), PyTorch's src_mask and src_key_padding_mask (true: left out), and those of
-- TransformerDecoderLayer's call.
function Transformer:forward(source, target, given)
  local o, own = options.read("Transformer", given, whole_defaults, whole_kinds), {}
  local memory = self.encoder(source, { mask = o.source_mask, src_mask = o.src_mask,
    src_key_padding_mask = o.src_key_padding_mask })
  for name in pairs(call_defaults) do own[name] = o[name] end
  return self.decoder(target, memory, own)
end

--- The mask of numbers with which a position sees itself and those before it: 0 and -infinity, [n, n].
---@param n integer
---@param given? { dtype: Dtype, device: Device }
---@return Tensor
function Transformer.generate_square_subsequent_mask(n, given) return masks.square_subsequent(n, given) end

return M
