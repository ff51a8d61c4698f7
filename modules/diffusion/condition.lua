--- What a network is conditioned on: a table of tensors whose first dimension is the batch, nested at will.
--
--     { labels = i64 [n],
--       text = { embeddings = [n, tokens, width], mask = bool [n, tokens], pooled = [n, width] },
--       sizes = [n, 6], guidance = [n, width],
--       pictures = [n, c, h, w], masks = [n, 1, h, w], cameras = { ... } }
--
-- A network reads the keys it knows. Numbers, strings and booleans are allowed: they belong to the whole batch. An
-- empty table (or nil) is the condition of a network that has none. The functions here never look at the names of the
-- keys, so a network may invent its own.
local ty = require "tycho"
local expect = require("tycho.arguments").expect

local M = {}

-- Keys in an order that does not change from run to run.
local function sorted(t)
  local keys = {}
  for key in pairs(t) do keys[#keys + 1] = key end
  table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
  return keys
end
M.keys = sorted

local function join(path, key) return path == "" and tostring(key) or path .. "." .. tostring(key) end

local function check_table(who, value)
  if type(value) ~= "table" then
    error(("%s: condition: expected a table such as { labels = labels }, got %s"):format(who,
      ty.is_tensor(value) and "a tensor" or type(value)), 3)
  end
end
M.check = check_table

local DEEPEST = 16 -- levels of tables: a circle has more

local function map(condition, fn, path, depth)
  local result = {}
  depth = depth or 1
  if depth > DEEPEST then
    require("tycho.arguments").fail("condition: expected at most %d levels of tables, got more at %s", DEEPEST, path)
  end
  for _, key in ipairs(sorted(condition)) do
    local value, here = condition[key], join(path, key)
    if ty.is_tensor(value) then
      result[key] = fn(value, here)
    elseif type(value) == "table" then
      result[key] = map(value, fn, here, depth + 1)
    else
      result[key] = value
    end
  end
  return result
end

--- A condition with fn(tensor, path) in the place of each tensor; path is like "text.embeddings".
---@param condition table
---@param fn fun(tensor: Tensor, path: string): any
---@return table
function M.map(condition, fn)
  check_table("condition.map", condition)
  expect("condition.map", "fn", fn, "a function")
  return map(condition, fn, "")
end

--- All tensors, as a list of { path, tensor } in a fixed order.
---@return table[]
function M.tensors(condition)
  local list = {}
  M.map(condition, function(tensor, path) list[#list + 1] = { path, tensor } end)
  return list
end

--- Moves all tensors: condition.to(c, { device = "cuda" }).
function M.to(condition, options)
  return M.map(condition, function(tensor) return tensor:to(options) end)
end

--- The samples `start` to start + count - 1.
function M.narrow(condition, start, count)
  return M.map(condition, function(tensor) return tensor:narrow(0, start, count) end)
end

--- The samples with these positions, i64 [m].
function M.select(condition, positions)
  return M.map(condition, function(tensor) return tensor:index_select(0, positions) end)
end

--- Raises an error that names the entry unless every tensor has n samples. who: the function that asks.
function M.check_batch(who, condition, n)
  M.map(condition, function(tensor, path)
    if tensor.ndim == 0 or tensor.shape[1] ~= n then
      error(("%s: condition.%s: expected [%d, ...], one for each sample, got [%s]"):format(who, path, n,
        table.concat(tensor.shape, ", ")), 0)
    end
  end)
end

local function merge(conditions, path)
  local first, result = conditions[1], {}
  for i = 2, #conditions do
    for key in pairs(conditions[i]) do
      if first[key] == nil then
        error(("condition.concat: %s: the first condition has none, condition %d has"):format(join(path, key), i), 0)
      end
    end
  end
  for _, key in ipairs(sorted(first)) do
    local values, here = {}, join(path, key)
    local tensors, tables = true, true
    for i, condition in ipairs(conditions) do
      local value = condition[key]
      if value == nil then error(("condition.concat: %s: condition %d has none"):format(here, i), 0) end
      values[i], tensors = value, tensors and ty.is_tensor(value)
      tables = tables and type(value) == "table"
    end
    if tensors then
      local shape = table.concat(values[1].shape, ", ", 2)
      for i = 2, #values do
        local other = table.concat(values[i].shape, ", ", 2)
        if other ~= shape then
          error(("condition.concat: %s: expected [n, %s] as in the first one, got [n, %s] in condition %d"):format(
            here, shape, other, i), 0)
        end
      end
      result[key] = ty.concat(values, 0)
    elseif tables then
      result[key] = merge(values, here)
    else
      for i = 2, #values do
        if values[i] ~= values[1] then
          error(("condition.concat: %s: expected the same in all conditions, got %s and %s"):format(here,
            tostring(values[1]), tostring(values[i])), 0)
        end
      end
      result[key] = values[1]
    end
  end
  return result
end

--- Conditions one after the other as one batch. All must have the same keys.
---@param conditions table[]
---@return table
function M.concat(conditions)
  expect("condition.concat", "conditions", conditions, "a list of tables")
  expect("condition.concat", "conditions[1]", conditions[1], "a table")
  for i, condition in ipairs(conditions) do
    if type(condition) ~= "table" then
      error(("condition.concat: condition %d: expected a table, got %s"):format(i, type(condition)), 2)
    end
  end
  if #conditions == 1 then return conditions[1] end
  return merge(conditions, "")
end

--- The condition that means "anything", for as many samples as `condition` has: what guidance pushes away from.
-- In this order: given[key] (a negative prompt, say; a tensor with one sample is repeated), what the network's method
-- null_condition(condition) returns for that key, for labels its null_label. Entries of `keep` stay as they are
-- (pictures and cameras, say, that both branches see). Any other entry is an error: nobody knows what nothing looks
-- like there.
---@param model any
---@param condition table
---@param given? table
---@param keep? table<string, boolean>
---@return table
function M.null(model, condition, given, keep)
  check_table("condition.null", condition)
  expect("condition.null", "given", given, "a table or nil")
  expect("condition.null", "keep", keep, "a table or nil")
  local is_table = type(model) == "table"
  local own = is_table and model.null_condition and model:null_condition(condition) or {}
  local result = {}
  for _, key in ipairs(sorted(condition)) do
    local value = condition[key]
    local null = given and given[key]
    if null == nil then null = own[key] end
    if null ~= nil then
      result[key] = M.like(null, value, key)
    elseif keep and keep[key] then
      result[key] = value
    elseif key == "labels" and is_table and model.null_label then
      result[key] = ty.full_like(value, model.null_label)
    else
      error(("condition.null: %s: expected a null condition (option null = { %s = ... }) or keep = { %s = true }, got "
        .. "neither"):format(key, key, key), 0)
    end
  end
  return result
end

--- `null` with as many samples as `like`: tensors with one sample are repeated. name is for errors.
function M.like(null, like, name)
  if ty.is_tensor(null) then
    if not ty.is_tensor(like) then error(("condition: %s: expected %s, got a tensor"):format(name, type(like)), 0) end
    if null.ndim == 0 then return ty.full_like(like, null:item()) end
    local n = like.shape[1]
    if null.shape[1] == n then return null end
    if null.shape[1] ~= 1 then
      error(("condition: %s: expected 1 or %d samples, got %d"):format(name, n, null.shape[1]), 0)
    end
    local shape = null.shape
    shape[1] = n
    return null:expand(shape)
  end
  if type(null) == "number" and ty.is_tensor(like) then return ty.full_like(like, null) end
  if type(null) == "table" and type(like) == "table" then
    local result = {}
    for _, key in ipairs(sorted(like)) do
      if null[key] == nil then error(("condition: %s: expected a null for it, got nil"):format(join(name, key)), 0) end
      result[key] = M.like(null[key], like[key], join(name, key))
    end
    return result
  end
  return null
end

-- value where the sample was not dropped, null where it was.
local function replace(value, null, dropped, name)
  if ty.is_tensor(value) then
    local shape = { dropped.shape[1] }
    for i = 2, value.ndim do shape[i] = 1 end
    return ty.where(dropped:reshape(shape), null, value)
  end
  if type(value) ~= "table" then return value end
  local result = {}
  for key, inner in pairs(value) do
    local other = null
    if type(null) == "table" then other = null[key] end
    result[key] = replace(inner, other, dropped, join(name, key))
  end
  return result
end

--- A condition in which a share of the samples became the null condition, at random: training for classifier-free
-- guidance (Ho and Salimans 2022).
-- p: the share, the same samples in all entries; or a table { text = 0.1, pictures = 0.05 } of entries that are dropped
-- each for itself (InstructPix2Pix). null: as M.null makes it.
---@param condition table
---@param null table
---@param p number|table<string, number>
---@return table
function M.drop(condition, null, p)
  check_table("condition.drop", condition)
  local first = M.tensors(condition)[1]
  if not first then return condition end
  local n, device = first[2].shape[1], first[2].device
  local function draw(share)
    if type(share) ~= "number" or not (share >= 0 and share <= 1) then
      error(("condition.drop: p: expected a share within [0, 1], got %s"):format(tostring(share)), 3)
    end
    return share > 0 and ty.rand({ n }, { device = device }):lt(share) or nil
  end
  local all
  if type(p) ~= "table" then
    all = draw(p)
    if not all then return condition end
  end
  local result = {}
  for _, key in ipairs(sorted(condition)) do
    local dropped = all
    if type(p) == "table" then dropped = p[key] and draw(p[key]) end
    if dropped and null[key] ~= nil then
      result[key] = replace(condition[key], null[key], dropped, key)
    else
      result[key] = condition[key]
    end
  end
  return result
end

return M
