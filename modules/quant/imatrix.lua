--- Importance matrices: for each column of a weight the mean square of what it is multiplied by, over some text. Blocks
-- of few bits are encoded so that columns with large inputs lose least (the op quantize with `importance`). The files
-- are llama.cpp's, the old binary form (.dat) and GGUF.
--
--     local found = quant.imatrix.collect(model, corpus.training, { rows = 64 })
--     found:save "model.imatrix.gguf"
--     quant.quantize(model, { dtype = "q2_k", importance = found })
--     quant.convert("folder", "model.gguf", "q2_k", { importance = quant.imatrix.load "model.imatrix.gguf" })
--
-- With a weight's error E, the expected square of what E x adds to an output is the sum of E_i E_j [x_i x_j] over
-- columns; this keeps the diagonal, as llama.cpp does (its pull request 4861), where GPTQ works with all of it.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local moments = require "tycho.quant.moments"
local writer = require "tycho.hub.gguf.writer"

local surgery = ty.nn.surgery
local expect, fail, none = arguments.expect, arguments.fail, arguments.none
local M = {}

--- Means of squared inputs by the name of the weight that they go into, as GGUF files have it where the model can be in
-- one ("blk.0.attn_q.weight"), else as the model has it.
---@class Imatrix
---@field means table<string, Tensor>  f32 [columns]; [experts, columns] where files have several matrices in one
---@field counts table<string, number> rows of inputs that the mean is of
---@field chunks integer               texts that were read
---@field chunk integer                tokens of a text
---@field datasets string[]            what files say that the texts are from
local Imatrix = {}
Imatrix.__index = Imatrix
M.Imatrix = Imatrix

local function new(o)
  return setmetatable({ means = {}, counts = {}, chunks = o.chunks or 0, chunk = o.chunk or 512,
    datasets = o.datasets or {} }, Imatrix)
end

local function sorted(list)
  local names = {}
  for name in pairs(list) do names[#names + 1] = name end
  table.sort(names)
  return names
end

--- The importance of the columns of a weight, or nil where nothing is known of it. name: as in `means`.
---@param name string
---@param columns integer
---@return Tensor? importance  f32 [columns]
function Imatrix:get(name, columns)
  local who = "Imatrix:get"
  expect(who, "name", name, "a string")
  expect(who, "columns", columns, "an integer >= 1")
  local mean = self.means[name]
  if not mean then return nil end
  if mean.ndim ~= 1 or mean.shape[1] ~= columns then
    fail("%s: %s: expected the importance of its %d columns, got [%s]: it is of another model", who, name, columns,
      table.concat(mean.shape, ", "))
  end
  return mean
end

function Imatrix:__tostring()
  return ("importance of the inputs of %d weights, by %d texts of %d tokens"):format(#sorted(self.means), self.chunks,
    self.chunk)
end

--- Collects the importance of the inputs of a model's linear layers. data: llm.data.Packed, or a list of its batches.
-- options: rows (128: of the dataset), batch (8), seed (0), device; skip (names of layers to leave out, or their ends),
-- head (false: the lm_head too), datasets ({}: what the file is to say of the texts), run (a function of the model and
-- a batch that runs it, for models that are not of language). A layer that no batch reaches has no importance.
---@param model Module
---@param data PackedDataset|table[]
---@param options? table
---@return Imatrix
function M.collect(model, data, options)
  local who = "quant.imatrix.collect"
  local defaults = { skip = {}, head = false, datasets = {}, run = none }
  for key, value in pairs(moments.options) do defaults[key] = value end
  local o = arguments.read(who, options, defaults, { skip = "a list of strings", datasets = "a list of strings",
    run = "a function" })
  local layers = surgery.find(who, model, { skip = o.skip, head = o.head })
  if #layers == 0 then fail("%s: model: expected one with linear layers, got none", who) end
  local batches = moments.batches(who, data, o)
  local name_of, sums, counts, removes, last = writer.names(model), {}, {}, {}, {}
  for _, layer in ipairs(layers) do
    local name = name_of(layer.name .. ".weight")
    removes[#removes + 1] = layer.module:register_forward_pre_hook(function(_, x)
      if not (last.x and rawequal(last.x, x)) then
        local squares, rows = ty.no_grad(ty.scope, function()
          local flat = x:detach():reshape(-1, x.shape[x.ndim]):to "f64"
          return flat:square():sum(0), flat.shape[1]
        end)
        last = { x = x, squares = ty.keep(squares), rows = rows }
      end
      sums[name] = ty.keep(sums[name] and sums[name] + last.squares or last.squares:clone())
      counts[name] = (counts[name] or 0) + last.rows
    end)
  end
  local was_training, chunks, chunk = model.training, 0, 0
  model:eval()
  local ok, problem = pcall(ty.no_grad, function()
    for i, batch in ipairs(batches) do
      if not o.run and not (type(batch) == "table" and ty.is_tensor(batch.tokens)) then
        fail("%s: data[%d]: expected a batch with tokens, got %s", who, i, arguments.describe(batch))
      end
      ty.scope(function()
        if o.run then
          o.run(model, batch)
        else
          model[model.hidden and not o.head and "hidden" or "forward"](model, batch.tokens,
            { cu_seqlens = batch.cu_seqlens, longest = batch.longest, mask = batch.mask })
        end
      end)
      last = {}
      local tokens = type(batch) == "table" and ty.is_tensor(batch.tokens) and batch.tokens
      chunks, chunk = chunks + (tokens and tokens.shape[1] or 1), tokens and tokens.shape[tokens.ndim] or 1
    end
  end)
  for _, remove in ipairs(removes) do remove() end
  model:train(was_training)
  if not ok then error(problem, 0) end
  local self = new { chunks = chunks, chunk = math.max(chunk, 1), datasets = o.datasets }
  for name, sum in pairs(sums) do
    if not sum:isfinite():all():item() then
      fail("%s: the inputs of %s are not finite: a weight or an activation is NaN or too large", who, name)
    end
    self.means[name] = ty.keep((sum / counts[name]):to { dtype = "f32", device = "cpu" })
    self.counts[name] = counts[name]
  end
  return self
end

--- What is known of the weights of a model: a function of a layer's name and columns that gives their importance, or
-- nil. Raises where `importance` is nothing of the model.
---@param who string
---@param model Module
---@param importance Imatrix
---@return fun(name: string, columns: integer): Tensor?
function M.of(who, model, importance)
  M.check(who, importance)
  expect(who, "model", model, "a module")
  local name_of, known = writer.names(model), false
  for name in model:named_parameters() do
    known = known or importance.means[name_of(name)] ~= nil
  end
  if not known then fail("%s: importance: expected one of this model, got names that it does not have", who) end
  return function(name, columns) return importance:get(name_of(name .. ".weight"), columns) end
end

--- Raises unless a value is an importance matrix.
function M.check(who, value)
  expect("quant.imatrix.check", "who", who, "a string")
  if getmetatable(value) ~= Imatrix then
    fail("%s: importance: expected one of quant.imatrix, got %s", who, arguments.describe(value))
  end
end

-- ---- files ----

local function to_f32(t) return ty.io.to_bytes(t:to "f32":contiguous()) end

-- The old form: i32 entries; of each i32 length, name, i32 calls, i32 values, f32 values, which are means times calls;
-- i32 chunks; i32 length, name of the dataset.
local function write_dat(self, path)
  local parts, names = {}, sorted(self.means)
  parts[1] = ("<i4"):pack(#names)
  for _, name in ipairs(names) do
    local mean = self.means[name]
    local calls = math.max(1, math.ceil(self.counts[name] / self.chunk))
    parts[#parts + 1] = ("<s4i4i4"):pack(name, calls, mean:numel())
    parts[#parts + 1] = to_f32(mean * calls)
  end
  parts[#parts + 1] = ("<i4s4"):pack(self.chunks, self.datasets[#self.datasets] or "")
  ty.io.write_atomic(path, table.concat(parts))
end

local function write_gguf(self, path)
  local tensors = {}
  for name, mean in pairs(self.means) do
    local matrices = mean.ndim == 2 and mean.shape[1] or 1
    tensors[name .. ".in_sum2"] = (mean:to "f64" * self.counts[name]):to "f32":reshape(matrices, -1)
    tensors[name .. ".counts"] = ty.full({ matrices, 1 }, self.counts[name], { dtype = "f32" })
  end
  ty.io.save_gguf(path, tensors, { ["general.type"] = "imatrix", ["imatrix.datasets"] = self.datasets,
    ["imatrix.chunk_count"] = self.chunks, ["imatrix.chunk_size"] = self.chunk },
    { types = { ["imatrix.datasets"] = "string[]", ["imatrix.chunk_count"] = "u32",
      ["imatrix.chunk_size"] = "u32" } })
end

--- Writes the file that llama.cpp's tools read: GGUF, or, where the path ends in .dat, the old form.
---@param path string
---@return Imatrix self
function Imatrix:save(path)
  expect("Imatrix:save", "path", path, "a string")
  if path:find "%.dat$" then write_dat(self, path) else write_gguf(self, path) end
  return self
end

local function add(self, name, values, count)
  if self.means[name] then error(("%s: is there twice"):format(name), 0) end
  if not values:isfinite():all():item() or values:lt(0):any():item() then
    error(("%s: a mean of squares is negative or not finite"):format(name), 0)
  end
  self.means[name], self.counts[name] = ty.keep(values), count
end

local function read_dat(text)
  local at = 1
  local function take(format, size, what)
    if at + size - 1 > #text then error(("ends inside of %s"):format(what), 0) end
    local value = format:unpack(text, at)
    at = at + size
    return value
  end
  local function take_text(what)
    local length = take("<i4", 4, what)
    if length < 0 or length > #text - at + 1 then error(("%s: a length of %d"):format(what, length), 0) end
    at = at + length
    return text:sub(at - length, at - 1)
  end
  local entries = take("<i4", 4, "its head")
  if entries < 1 or entries > #text // 16 then error(("says that it has %d entries"):format(entries), 0) end
  local self = new {}
  for i = 1, entries do
    local what = ("entry %d of %d"):format(i, entries)
    local name = take_text(what)
    if name == "" then error(what .. ": has no name", 0) end
    local calls, n = take("<i4", 4, what), take("<i4", 4, what)
    if n < 1 or n > (#text - at + 1) // 4 then error(("%s: says that it has %d values"):format(name, n), 0) end
    if calls < 0 then error(("%s: says that it was read %d times"):format(name, calls), 0) end
    local values = ty.io.from_bytes(text:sub(at, at + 4 * n - 1), "f32", { n })
    at = at + 4 * n
    add(self, name, values / math.max(calls, 1), math.max(calls, 1) * self.chunk)
  end
  if at <= #text then -- older files end here
    self.chunks = take("<i4", 4, "the count of texts")
    if self.chunks < 0 then error(("says that it is of %d texts"):format(self.chunks), 0) end
    if at <= #text then self.datasets = { take_text "the name of the texts" } end
    if at <= #text then error(("%d bytes follow its end"):format(#text - at + 1), 0) end
  end
  return self
end

local function read_gguf(path)
  local tensors, metadata = ty.io.load_gguf(path)
  if metadata["general.type"] ~= "imatrix" then
    error(('general.type is %s, not "imatrix"'):format(arguments.describe(metadata["general.type"])), 0)
  end
  local function whole(key, default)
    local value = metadata[key]
    if value == nil then return default end
    if not math.tointeger(value) or value < 0 then
      error(("%s: expected an integer >= 0, got %s"):format(key, arguments.describe(value)), 0)
    end
    return math.tointeger(value)
  end
  local datasets = {}
  for _, name in ipairs(type(metadata["imatrix.datasets"]) == "table" and metadata["imatrix.datasets"] or {}) do
    datasets[#datasets + 1] = type(name) == "string" and name or nil
  end
  local self = new { chunks = whole("imatrix.chunk_count", 0), chunk = math.max(whole("imatrix.chunk_size", 512), 1),
    datasets = datasets }
  for key, sums in pairs(tensors) do
    local name, part = key:match "^(.+)%.(in_sum2)$"
    if not name then name, part = key:match "^(.+)%.(counts)$" end
    if not name then error(("%s: expected names that end in .in_sum2 or .counts"):format(key), 0) end
    local counts = tensors[name .. ".counts"]
    if not counts or not tensors[name .. ".in_sum2"] then
      error(("%s: expected .in_sum2 and .counts, got only one of them"):format(name), 0)
    end
    if part == "in_sum2" then
      local n = sums.shape[sums.ndim] or 0
      if sums.dtype ~= "f32" or counts.dtype ~= "f32" or n < 1 or counts:numel() < 1
        or sums:numel() ~= counts:numel() * n then
        error(("%s: expected f32 [matrices, columns] and [matrices, 1], got %s [%s] and %s [%s]"):format(name,
          sums.dtype, table.concat(sums.shape, ", "), counts.dtype, table.concat(counts.shape, ", ")), 0)
      end
      counts = counts:reshape(-1, 1)
      local most = counts:max():item()
      if not counts:isfinite():all():item() or counts:lt(0):any():item() then
        error(("%s: a count is negative or not finite"):format(name), 0)
      end
      -- What was never used counts evenly, as llama.cpp has it.
      local means = ty.where(counts:gt(0), sums:reshape(-1, n) / counts:clamp(1), 1.0)
      add(self, name, counts:numel() == 1 and means:flatten() or means, math.max(most, 1))
    end
  end
  if not next(self.means) then error("has no entries", 0) end
  return self
end

--- Reads a file of llama.cpp's tool imatrix, of either form, or of Imatrix:save. Files are checked: sizes, names that
-- are there twice, values that are no means of squares.
---@param path string
---@return Imatrix
function M.load(path)
  local who = "quant.imatrix.load"
  expect(who, "path", path, "a string")
  local ok, found = pcall(function()
    local text = ty.io.read(path)
    if text:sub(1, 4) == "GGUF" then return read_gguf(path) end
    return read_dat(text)
  end)
  if not ok then arguments.raise(found, ("%s: %s: "):format(who, path)) end
  return found
end

return M
