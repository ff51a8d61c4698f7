--- Saving and loading the state of modules: state_dict, load_state_dict, save, load.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local base = require "tycho.nn.module"

local Module = base.Module

--- Parameters and persistent buffers by name. The tensors share memory with the module and carry no history.
---@return table<string, Tensor>
function Module:state_dict()
  local state = {}
  base.walk_state(self, function(kind, name, tensor, owner, key)
    if kind == "parameter" or owner._buffers[key] then state[name] = tensor:detach() end
  end)
  return state
end

-- Names that differ only in their numbers make one line with a count.
local function by_prefix(names)
  local counts, order = {}, {}
  table.sort(names)
  for _, name in ipairs(names) do
    local pattern = ("." .. name):gsub("%.%d+", ".N"):sub(2)
    if not counts[pattern] then
      counts[pattern] = { count = 0, example = name }
      order[#order + 1] = pattern
    end
    counts[pattern].count = counts[pattern].count + 1
  end
  local lines = {}
  for i, pattern in ipairs(order) do
    if i > 20 then
      lines[#lines + 1] = ("    and %d more"):format(#order - 20)
      break
    end
    local entry = counts[pattern]
    local text = entry.count == 1 and entry.example or ("%s (%d of them)"):format(pattern, entry.count)
    lines[#lines + 1] = "    " .. text
  end
  return table.concat(lines, "\n")
end

local function report_text(report)
  local parts = {}
  if #report.missing > 0 then
    parts[#parts + 1] = ("  missing (%d):\n%s"):format(#report.missing, by_prefix(report.missing))
  end
  if #report.unexpected > 0 then
    parts[#parts + 1] = ("  unexpected (%d):\n%s"):format(#report.unexpected, by_prefix(report.unexpected))
  end
  if #report.mismatched > 0 then
    parts[#parts + 1] = ("  of another shape (%d):\n    %s"):format(#report.mismatched,
      table.concat(report.mismatched, "\n    ", 1, math.min(20, #report.mismatched)))
  end
  return table.concat(parts, "\n")
end

local function shape_text(t) return "[" .. table.concat(t.shape, ", ") .. "]" end

--- Copies `state` into parameters and buffers, converting dtypes. Nothing is changed unless all of it fits.
---@param state table<string, Tensor>
---@param options? {strict: boolean}  strict (default): missing, unexpected and misshapen names are an error
---@return {missing: string[], unexpected: string[], mismatched: string[]} report
function Module:load_state_dict(state, options)
  local strict = arguments.read("load_state_dict", options, { strict = true }).strict
  arguments.expect("load_state_dict", "state", state, "a table")
  local report = { missing = {}, unexpected = {}, mismatched = {} }
  local known, copies = {}, {}
  base.walk_state(self, function(kind, name, tensor, owner, key)
    if kind == "buffer" and not owner._buffers[key] then return end
    known[name] = true
    local source = state[name]
    if source == nil then
      table.insert(report.missing, name)
    elseif not ty.is_tensor(source) then
      arguments.fail("load_state_dict: %s: expected a tensor, got %s", name, arguments.describe(source))
    elseif shape_text(source) ~= shape_text(tensor) then
      table.insert(report.mismatched,
        ("%s: the module has %s, the state %s"):format(name, shape_text(tensor), shape_text(source)))
    else
      copies[#copies + 1] = { tensor, source }
    end
  end)
  for name in pairs(state) do
    if not known[name] then table.insert(report.unexpected, tostring(name)) end
  end
  table.sort(report.unexpected)
  if strict and #report.missing + #report.unexpected + #report.mismatched > 0 then
    arguments.fail("load_state_dict: the state does not fit the module\n%s", report_text(report))
  end
  ty.no_grad(function()
    for _, pair in ipairs(copies) do pair[1]:copy_(pair[2]) end
  end)
  return report
end

--- Writes the state to a safetensors file (beside, then renamed). Shared parameters are written under each name.
---@param path string
---@param metadata? table<string, string>
function Module:save(path, metadata)
  arguments.expect("Module:save", "path", path, "a string")
  arguments.expect("Module:save", "metadata", metadata, "a table or nil")
  local ok, problem = pcall(ty.io.save_safetensors, path, self:state_dict(), metadata)
  if not ok then arguments.raise(problem, "Module:save: ") end
  return self
end

--- Reads a safetensors file into the module; options as in load_state_dict(). Returns self and the report.
---@param path string
function Module:load(path, options)
  arguments.expect("Module:load", "path", path, "a string")
  local ok, report = pcall(self.load_state_dict, self, ty.io.load_safetensors(path), options)
  if not ok then arguments.raise(report, path .. ": ") end
  return self, report
end
