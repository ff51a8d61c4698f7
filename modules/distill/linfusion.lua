--- LinFusion (Liu et al. 2024, "LinFusion: 1 GPU, 1 Minute, 16K Image"): the self-attention of a network that draws
-- becomes a normalised linear attention, which is learnt from the network and takes time in proportion to the pixels:
--
--     q = W_q (x + f_q(x)),  k = W_k (x + f_k(x)),  v = W_v x     W of the teacher; f: linear, norm, leaky ReLU, linear
--     y_i = phi(q_i) mean_j(phi(k_j) v_j') / (phi(q_i) . mean_j phi(k_j) + 1e-4)     phi = elu + 1, over all j
--
-- The means in the place of sums keep y where it was when a picture has more pixels than those that were trained on.
-- Only the f are trained, by
--
--     |e - target|^2 + 0.5 |e - e_teacher|^2 + 0.5 mean over layers |output of attention - the teacher's|^2
local ty = require "tycho"
local arguments = require "tycho.arguments"
local layers = require("tycho.diffusion").attention.layers
local new_teacher = require "tycho.distill.teacher"

local nn = ty.nn
local expect, fail = arguments.expect, arguments.fail
local M = {}

local EPS = 1e-4

--- Linear attention over all keys, without the [t, s] matrix: q [b, h, t, d], k [b, h, s, d], v [b, h, s, dv] to [b, h,
-- t, dv]. normalised: true; false leaves the division out, as attention that only keeps a state does.
---@param q Tensor
---@param k Tensor
---@param v Tensor
---@param normalised? boolean
---@return Tensor
function M.attention(q, k, v, normalised)
  local who = "distill.linear_attention"
  for name, x in pairs { q = q or false, k = k or false, v = v or false } do
    if not ty.is_tensor(x) or x.ndim ~= 4 then
      fail("%s: %s: expected a tensor [b, h, t, d], got %s", who, name, arguments.describe(x))
    end
  end
  expect(who, "normalised", normalised, "a boolean or nil")
  local s = k.shape[3]
  q, k = ty.elu(q, 1) + 1, ty.elu(k, 1) + 1
  local state = k:transpose(-2, -1):matmul(v) / s
  local y = q:matmul(state)
  if normalised == false then return y end
  return y / (q:matmul(k:mean(2, true):transpose(-2, -1)) + EPS)
end

-- f of queries or keys: nothing at first.
local function more(width, hidden)
  local last = nn.Linear(hidden, width)
  nn.init.zeros(last.weight)
  nn.init.zeros(last.bias)
  return nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.LeakyReLU(), last)
end

local wrapper = nn.surgery.wrapper { name = "Linear", field = "_linear_attention",
  fields = { "more_q", "more_k" }, forward = function(base)
    return function(self, x, context, ...)
      if context ~= nil and not rawequal(context, x) then return base.forward(self, x, context, ...) end
      local state = self._linear_attention
      return layers.run(self, x, function(q, k, v) return M.attention(q, k, v, state.normalised) end,
        function(tokens) return tokens + self.more_q(tokens), tokens + self.more_k(tokens) end)
    end
  end }

--- A copy of a network whose self-attention is linear and whose f alone want gradients. options: hidden (half the width
-- of a layer: that of f), normalised (true). Weights keep their names; more_q and more_k are new.
---@param model Module
---@param options? { hidden?: integer, normalised?: boolean }
---@return Module student
function M.student(model, options)
  local who = "distill.linfusion"
  expect(who, "model", model, "a module")
  local o = arguments.read(who, options, { hidden = arguments.none, normalised = true },
    { hidden = "an integer >= 1" })
  local student = model:clone():requires_grad_(false)
  for _, site in ipairs(layers.find(who, student)) do
    local layer = site.module
    if rawget(layer, "add_k_proj") then
      fail("%s: model: expected one whose maps attend to themselves, got %s with text in the same attention", who,
        site.name)
    end
    local inner = rawget(layer, "qkv") or layer.to_q
    local width = (nn.surgery.sizes(inner))
    layer.more_q, layer.more_k = more(width, o.hidden or width // 2), more(width, o.hidden or width // 2)
    layer.more_q:to(inner.weight.device)
    layer.more_k:to(inner.weight.device)
    wrapper:wrap(layer, { normalised = o.normalised })
  end
  return student
end

--- What the layers of self-attention of a network gave in fn(): a list of tensors, and what fn returned.
---@param model Module|Teacher
---@param fn function
---@return Tensor[] outputs
---@return any
function M.watch(model, fn)
  local who = "distill.watch"
  expect(who, "fn", fn, "a function")
  if type(model) == "table" and not nn.is_module(model) and model.model then model = model.model end
  local outputs, removers = {}, {}
  for i, site in ipairs(layers.find(who, model)) do
    removers[i] = site.module:register_forward_hook(function(_, y) -- blocks without gradients give back what they made
      outputs[#outputs + 1] = ty.is_grad_enabled() and y[1] or ty.keep(y[1])
    end)
  end
  local result = table.pack(pcall(fn))
  for _, remove in ipairs(removers) do remove() end
  if not result[1] then error(result[2], 0) end
  return outputs, table.unpack(result, 2, result.n)
end

--- The loss of a student for distill.fit: loss(parts, batch) with a frozen teacher. process: a Process (Flow, say);
-- options: output (0.5: the share of the distance to what the teacher says) and features (0.5: of that to what its
-- attention gives), read (a function of the batch: clean samples and their condition; the batch's image and none).
---@param process Process
---@param options? { output?: number, features?: number, read?: function }
---@return fun(parts: DistillParts, batch: table): Tensor, table
function M.loss(process, options)
  local who = "distill.linfusion_loss"
  expect(who, "process", process, "a table")
  local o = arguments.read(who, options, { output = 0.5, features = 0.5, read = function(batch)
    return batch.image, {}
  end }, { output = "a number >= 0", features = "a number >= 0" })
  return function(parts, batch)
    local x0, condition = o.read(batch)
    local teacher = new_teacher(parts.teacher)
    local gap, inner
    local function both(_, x, t, given)
      local wanted, theirs = M.watch(teacher, function() return teacher(x, t, given) end)
      local found, mine = M.watch(parts.student, function() return parts.student(x, t, given) end)
      gap = (mine - theirs):square():mean()
      for i, y in ipairs(found) do
        local far = (y - wanted[i]):square():mean()
        inner = inner and inner + far or far
      end
      inner = inner / #found
      return mine
    end
    -- With the student's fields: what stands for no condition, say.
    local own = process:loss(setmetatable({}, { __call = both, __index = parts.student }), x0, condition)
    return own + o.output * gap + o.features * inner, { teacher = gap:item(), features = inner:item() }
  end
end

return M
