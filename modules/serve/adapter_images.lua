--- What an adapter of low rank is in the pages of a pool: the rows of A of all its linear layers in the rows of keys,
-- those of B transposed in the rows of values, of each layer of the model in that layer's. Layers of the model are
-- alike, so that where a site (a linear layer of each of them, such as "model.layers.*.self_attn.q_proj") has its rows
-- is the same in all.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local surgery = ty.nn.surgery
local fail = arguments.fail
local M = {}

--- How adapters of a model lie in a pool's pages. pad: the rank that all of them get, or nil.
---@param who string
---@param model LanguageModel
---@param pool PagePool
---@param pad? integer
---@return table form
function M.form(who, model, pool, pad)
  local c = model.config or {}
  local heads = c.num_key_value_heads or c.num_attention_heads
  local width = heads and (c.head_dim or c.hidden_size // c.num_attention_heads)
  if not width then fail("%s: engine: expected a model whose config says how wide keys are", who) end
  local weight
  for _, p in ipairs(model:parameters()) do
    if not weight and p:is_floating_point() then weight = p end
  end
  local dtype = weight.dtype
  local names, modules = surgery.modules(model)
  local form = { width = heads * width, page = pool.page, layers = pool.layers, dtype = pool.dtype or dtype, pad = pad,
    modules = modules, names = names, sites = {}, by_key = {} }
  form.page_bytes = 2 * form.layers * form.page * form.width * ty.empty({ 1 }, { dtype = form.dtype }):nbytes()
  return form
end

--- Pairs that were given as such, checked.
---@param who string
---@param list table[]
---@return table[]
function M.check(who, list)
  if #list == 0 then fail("%s: source: expected a path or a list of pairs, got an empty list", who) end
  local result = {}
  for i, pair in ipairs(list) do
    local function bad(what) fail("%s: source: expected %s in pair %d", who, what, i) end
    if type(pair) ~= "table" or type(pair.name) ~= "string" then bad "the name of a linear layer" end
    local a, b, scale = pair.a, pair.b, pair.scale == nil and 1 or pair.scale
    local fine = ty.is_tensor(a) and ty.is_tensor(b) and a.ndim == 2 and b.ndim == 2 and a:is_floating_point()
      and b:is_floating_point() and a.shape[1] == b.shape[2] and a.shape[1] > 0
    if not fine then bad "a [rank, inputs] and b [outputs, rank], floating point," end
    if type(scale) ~= "number" or scale ~= scale or math.abs(scale) == math.huge then bad "a number as scale" end
    result[i] = { name = pair.name, a = a:detach(), b = b:detach(), scale = scale }
  end
  return result
end

-- The site of a linear layer, and the number of the model's layer.
local function place(form, pair)
  local module = form.modules[pair.name]
  if not module or surgery.kind(module) ~= "linear" then
    error(("%s: expected a linear layer of the model"):format(pair.name), 0)
  end
  local before, number, after = pair.name:match "^(.-)%.(%d+)%.(.*)$"
  local layer = number and tonumber(number) + 1
  if not layer or layer > form.layers or after:find "%.%d+%." or after:find "experts" then
    error(("%s: expected a linear layer that every layer of the model has once and that sees all tokens"):format(
      pair.name), 0)
  end
  local key = before .. ".*." .. after
  local site, inputs, outputs = form.by_key[key], surgery.sizes(module)
  if not site then
    site = { key = key, inputs = inputs, outputs = outputs, a_rows = (inputs + form.width - 1) // form.width,
      b_rows = (outputs + form.width - 1) // form.width }
    form.by_key[key] = site
    form.sites[#form.sites + 1] = site
  end
  if pair.a.shape[2] ~= inputs or pair.b.shape[1] ~= outputs or inputs ~= site.inputs or outputs ~= site.outputs then
    error(("%s: expected A and B for a layer [%d, %d], got A [%d, %d] and B [%d, %d]"):format(pair.name, site.outputs,
      site.inputs, pair.a.shape[1], pair.a.shape[2], pair.b.shape[1], pair.b.shape[2]), 0)
  end
  return site, layer, module
end

-- Files of half precision stay so in host memory, with their scales beside them.
local function dtype_of(list, form)
  local dtype = list[1].a.dtype
  for _, pair in ipairs(list) do
    if pair.a.dtype ~= dtype or pair.b.dtype ~= dtype then return form.dtype end
  end
  return (dtype == "f16" or dtype == "bf16") and dtype or form.dtype
end

--- The image of an adapter, in host memory: a and b [layers, pages * page, width], scales [layers, pages * page, 1] of
-- the rows of b or nil, pages, bytes, where each site begins, and the layers that it is for.
---@param form table
---@param list table[]  pairs
---@return table image
function M.make(form, list)
  local ranks, order, layers, a_at, b_at = {}, {}, {}, {}, {}
  for i, pair in ipairs(list) do
    local site, layer, module = place(form, pair)
    if not ranks[site] then order[#order + 1] = site end
    ranks[site] = math.max(ranks[site] or form.pad or 1, pair.a.shape[1])
    layers[i] = { site = site.key, layer = layer, module = module }
  end
  local a_rows, b_rows = 0, 0
  for _, site in ipairs(order) do
    a_at[site], b_at[site] = a_rows, b_rows
    a_rows, b_rows = a_rows + ranks[site] * site.a_rows, b_rows + ranks[site] * site.b_rows
  end
  local pages = (math.max(a_rows, b_rows) + form.page - 1) // form.page
  local options, shape = { dtype = dtype_of(list, form) }, { form.layers, pages * form.page, form.width }
  local a, b = ty.zeros(shape, options), ty.zeros(shape, options)
  local scales = ty.ones({ shape[1], shape[2], 1 }, { dtype = form.dtype == "f64" and "f64" or "f32" })
  -- `rank` rows of x from row `at` on, each in so many rows of the image.
  local function put(to, at, x, each)
    local rank, wide = x.shape[1], x.shape[2]
    local room = to:narrow(0, at, rank * each):reshape(rank, each * form.width)
    room:narrow(1, 0, wide):copy_(x)
  end
  for i, pair in ipairs(list) do
    local site, layer = form.by_key[layers[i].site], layers[i].layer - 1
    put(a:select(0, layer), a_at[site], pair.a, site.a_rows)
    put(b:select(0, layer), b_at[site], pair.b:transpose(0, 1), site.b_rows)
    scales:select(0, layer):narrow(0, b_at[site], pair.a.shape[1] * site.b_rows):fill_(pair.scale)
  end
  -- Scales of powers of two go into B without a loss.
  local scaled = (b:to(scales.dtype) * scales):to(b.dtype)
  if scaled:to(scales.dtype):equal(b:to(scales.dtype) * scales) then b, scales = scaled, nil end
  local image = { a = ty.keep(a), b = ty.keep(b), scales = scales and ty.keep(scales), pages = pages, layers = layers,
    sites = order, ranks = ranks, a_at = a_at, b_at = b_at }
  image.bytes = a:nbytes() + b:nbytes() + (scales and scales:nbytes() or 0)
  return image
end

--- Writes an image into the rows `slots` i64 [pages * page] of a pool.
---@param form table
---@param image table
---@param pool PagePool
---@param slots Tensor
function M.put(form, image, pool, slots)
  local device = slots.device
  local a, b = image.a:to { device = device }, image.b:to { device = device }
  if image.scales then b = b:to(image.scales.dtype) * image.scales:to { device = device } end
  for layer = 1, form.layers do
    local k = pool:wide(layer, "k", form.width, form.dtype, device)
    local v = pool:wide(layer, "v", form.width, form.dtype, device)
    k:index_put_({ slots }, a:select(0, layer - 1):to(k.dtype))
    v:index_put_({ slots }, b:select(0, layer - 1):to(v.dtype))
  end
end

--- Of each site by its key, where its pairs are: rank, a_rows and b_rows [rank, rows of each].
---@param image table
---@param slots Tensor
---@return table<string, {rank: integer, a_rows: Tensor, b_rows: Tensor}>
function M.rows(image, slots)
  local parts = {}
  for _, site in ipairs(image.sites) do
    local rank = image.ranks[site]
    parts[site.key] = { rank = rank,
      a_rows = ty.keep(slots:narrow(0, image.a_at[site], rank * site.a_rows):reshape(rank, site.a_rows)),
      b_rows = ty.keep(slots:narrow(0, image.b_at[site], rank * site.b_rows):reshape(rank, site.b_rows)) }
  end
  return parts
end

return M
