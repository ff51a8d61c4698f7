--- Layers with an adapter. A layer stays the object that it was, with its weights under their names; its class becomes
-- one that adds scale * B(A(x)), or what another way (tycho.peft.ways) makes of it, and it gets the parameters of that,
-- named as PEFT names them.
local ty = require "tycho"

local nn = ty.nn
local surgery = nn.surgery
local parameter = require("tycho.nn.options").parameter
local ways = require "tycho.peft.ways"
local M = {}

--- "linear", "embedding" or "conv" (of pictures or signals, in one group): how a module can be adapted; nil when it
-- cannot.
function M.kind(module)
  local kind = surgery.kind(module)
  if kind == "conv" then return module.groups == 1 and module.weight.ndim >= 3 and kind or nil end
  return (kind == "linear" or kind == "embedding") and kind or nil
end

local function dense(self, dtype) return surgery.rows(self):to(dtype) end

-- B of a linear layer, [outputs, rank]: a parameter, or what other parameters make of it.
local function outer(self, dtype)
  local a = self._lora
  if a.outer then return a.outer(self, dtype) end
  local b = self.lora_B.weight
  return dtype and b:to(dtype) or b
end

-- A and B of a linear layer with what PiSSA takes away at the start: as many rows and columns again.
local function with_start(self)
  local start = self._lora.start
  return ty.concat({ self.lora_A.weight, start.a }, 0), ty.concat({ outer(self), -start.b }, 1)
end

-- What the adapter adds to dense().
local function change(self, dtype)
  local embedding = self.lora_embedding_A
  local a = (embedding or self.lora_A.weight):detach():to(dtype)
  local b = (embedding and self.lora_embedding_B:to(dtype) or outer(self, dtype)):detach()
  if self._lora.start then
    a, b = with_start(self)
    a, b = a:detach():to(dtype), b:detach():to(dtype)
  end
  -- Of a convolution, A has its kernel and B has one of a single place.
  if a.ndim >= 3 then a, b = a:flatten(1), b:flatten(1) end
  local product = b:matmul(a) * self._lora.scale
  return embedding and product:transpose(0, 1) or product
end

-- The norm of each output's row.
local function row_norms(w) return w:norm(2, 1) end

--- The weight with the adapter in it, in f64, as [outputs, inputs] or [rows, width].
function M.merged_weight(self)
  local way = self._lora.way
  if way then return ty.no_grad(way.merged, self, dense(self, "f64")) end
  local w = dense(self, "f64") + change(self, "f64")
  local magnitude = self.lora_magnitude_vector
  if magnitude then w = w * (magnitude:detach():to("f64") / row_norms(w)):unsqueeze(1) end
  return w
end

-- Weight-decomposed: the rows of the weight have learned lengths, and LoRA turns them. The norm counts as a constant.
-- Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", section 4.3.
local function decomposed(self, base, y, h, dropped, low)
  local norms = ty.no_grad(function() return row_norms(dense(self, low.dtype) + change(self, low.dtype)) end)
  local factor = self.lora_magnitude_vector / norms
  local plain = dropped and base.forward(self, h:to(y.dtype)) or y
  if self.bias then plain = plain - self.bias end
  return y + ((factor - 1) * plain:to(low.dtype) + factor * self.lora_B(low)):to(y.dtype)
end

local function linear_forward(base)
  return function(self, x, residual, activation)
    local a = self._lora
    if a.off or a.merged then return base.forward(self, x, residual, activation) end
    if a.way then return a.way.forward(self, base, x, residual, activation) end
    local h, dropped = x:to(self.lora_A.weight.dtype), self.training and a.dropout > 0
    if dropped then h = ty.dropout(h, a.dropout, true) end
    if a.start then
      local inner, over = with_start(self)
      local y = base.forward(self, x, residual)
      return surgery.finish(y, ty.linear(ty.linear(h, inner) * a.scale, over):to(y.dtype), activation)
    end
    local low = self.lora_A(h) * a.scale
    if self.lora_magnitude_vector then
      local y = decomposed(self, base, base.forward(self, x), h, dropped, low)
      return surgery.finish(y, residual, activation)
    end
    local y = base.forward(self, x, residual)
    if y.dtype == low.dtype then return ty.linear(low, outer(self), nil, y, activation) end
    return surgery.finish(y, ty.linear(low, outer(self)):to(y.dtype), activation)
  end
end

local function embedding_forward(base)
  return function(self, index)
    local y, a = base.forward(self, index), self._lora
    if a.off or a.merged then return y end
    local low = ty.embedding(self.lora_embedding_A:transpose(0, 1), index) * a.scale
    return y + ty.linear(low, self.lora_embedding_B):to(y.dtype)
  end
end

local function conv_forward(base)
  return function(self, x)
    local y, a = base.forward(self, x), self._lora
    if a.off or a.merged then return y end
    local h = x:to(self.lora_A.weight.dtype)
    if self.training and a.dropout > 0 then h = ty.dropout(h, a.dropout, true) end
    return y + self.lora_B(self.lora_A(h) * a.scale):to(y.dtype)
  end
end

local forwards = { linear = linear_forward, embedding = embedding_forward, conv = conv_forward }

local fields = { "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "lora_S",
  "lora_B_frozen", "lora_start" }
table.move(ways.fields, 1, #ways.fields, #fields + 1, fields)

--- The wrapper that adds a low-rank adapter to a layer.
M.lora = surgery.wrapper { name = "Lora", field = "_lora", fields = fields,
  forward = function(base, kind) return forwards[kind](base) end,
  describe = function(a) return ("rank = %d%s"):format(a.rank, a.merged and ", merged" or "") end }

-- The directions of the largest singular values: A and B whose product is the nearest of its rank to the weight.
-- Meng et al. 2024, "PiSSA: Principal Singular Values and Singular Vectors Adaptation of Large Language Models".
local function principal(module, spec)
  return ty.no_grad(function()
    local u, s, vh = ty.svd(dense(module, "f64"))
    local root = (s:narrow(0, 0, spec.rank) / spec.scale):sqrt()
    local a = vh:narrow(0, 0, spec.rank) * root:unsqueeze(1)
    return a:to(spec.dtype), (u:narrow(1, 0, spec.rank) * root:unsqueeze(0)):to(spec.dtype)
  end)
end

--- Gives a layer an adapter that changes nothing yet. spec: rank, scale, alpha, dropout, dora, dtype, init; way (of
-- tycho.peft.ways) and what that asks for.
function M.attach(module, spec)
  local kind = M.kind(module)
  local inputs, outputs = surgery.sizes(module)
  M.lora:wrap(module, { rank = spec.rank, scale = spec.scale, alpha = spec.alpha, dropout = spec.dropout,
    way = spec.way })
  nn.with_defaults({ dtype = spec.dtype, device = module.weight.device }, function()
    if spec.way then
      ways.attach(module, spec, inputs, outputs)
    elseif kind == "linear" then
      module.lora_A = nn.Linear(inputs, spec.rank, { bias = false })
      module.lora_B = nn.Linear(spec.rank, outputs, { bias = false })
      nn.init.zeros(module.lora_B.weight)
    elseif kind == "conv" then
      local Conv = module.weight.ndim == 3 and nn.Conv1d or nn.Conv2d
      module.lora_A = Conv(module.in_channels, spec.rank, module.kernel_size, { stride = module.stride,
        padding = module.padding, dilation = module.dilation, bias = false })
      module.lora_B = Conv(spec.rank, outputs, 1, { bias = false })
      nn.init.zeros(module.lora_B.weight)
    else
      module.lora_embedding_A = parameter({ spec.rank, inputs }, nn.init.zeros)
      module.lora_embedding_B = parameter({ outputs, spec.rank }, nn.init.normal)
    end
    if spec.init == "pissa" then
      local a, b = principal(module, spec)
      ty.no_grad(function()
        module.lora_A.weight:copy_(a)
        module.lora_B.weight:copy_(b)
      end)
      -- What is taken away is what training begins with, as it was rounded.
      module._lora.start = { a = ty.keep(module.lora_A.weight:detach():clone()),
        b = ty.keep(module.lora_B.weight:detach():clone()) }
    end
    if spec.dora then
      module.lora_magnitude_vector = parameter({ outputs }, function(t)
        ty.no_grad(function() t:copy_(row_norms(dense(module, "f32"))) end)
      end)
    end
  end)
  module:train(module.training)
end

--- Makes the layer what it was.
function M.detach(module) M.lora:unwrap(module) end

--- The adapter's parameters of a layer, those that are trained: a list of { name, tensor }, named as in PEFT's files.
function M.parameters(module)
  local list, fixed = {}, module._lora.fixed or {}
  for _, name in ipairs(M.lora.fields) do
    local value = rawget(module, name)
    if value and not fixed[name] then
      list[#list + 1] = nn.is_module(value) and { name .. ".weight", value.weight } or { name, value }
    end
  end
  return list
end

--- What PEFT's files say of a layer's adapter: a list of { name, tensor }. One whose B is computed is plain LoRA there,
-- and one of PiSSA has twice the rank.
function M.published(module)
  if module._lora.start then
    local a, b = ty.no_grad(with_start, module)
    return { { "lora_A.weight", a }, { "lora_B.weight", b } }
  end
  if not module._lora.outer then return M.parameters(module) end
  return { { "lora_A.weight", module.lora_A.weight }, { "lora_B.weight", ty.no_grad(outer, module) } }
end

return M
