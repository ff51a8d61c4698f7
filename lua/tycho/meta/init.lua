--- Declarations of the ops for the editor (LuaLS), made from the table of ops. The build writes them to meta/ops.lua of
-- its folder and they are installed beside meta/core.lua.

local meta = {}

local types = {
  tensor = "Tensor", optional = "Tensor", operand = "Tensor|number", tensors = "Tensor[]",
  int = "integer", float = "number", bool = "boolean", string = "string",
  ints = "integer|integer[]", varints = "integer|integer[]", dtype = "Dtype", device = "Device",
  number = "number", named = "string",
}

local keywords = { ["end"] = true, ["repeat"] = true, ["and"] = true, ["or"] = true, ["not"] = true, ["in"] = true }

local function add(lines, owner, separator, name, op, first)
  lines[#lines + 1] = "--- " .. op.doc
  local names, options = {}, false
  for i = first, #op.args do
    local arg, kind = op.args[i], types[op.args[i].kind]
    if not arg.required and not options then -- a table of options may stand from here on
      kind, options = kind .. "|table", true
    end
    names[#names + 1] = keywords[arg.name] and arg.name .. "_" or arg.name
    lines[#lines + 1] = ("---@param %s%s %s"):format(names[#names], arg.required and "" or "?", kind)
  end
  local results = {}
  for i = 1, op.flags.FIRST and 1 or op.nout do results[i] = "Tensor" end
  if #results > 0 then lines[#lines + 1] = "---@return " .. table.concat(results, ", ") end
  local target = keywords[name] and ("%s[%q] = function(%s) end"):format(owner, name, table.concat(names, ", "))
    or ("function %s%s%s(%s) end"):format(owner, separator, name, table.concat(names, ", "))
  lines[#lines + 1] = target .. "\n"
end

--- The text of the declarations.
---@return string
function meta.text()
  local lines = { "---@meta", "-- Made from the table of ops by tycho.meta.", "", "---@class ty", "local ty = {}", "",
    "---@class Tensor", "local Tensor = {}", "" }
  for _, op in ipairs(require("tycho.core").ops()) do
    if not op.flags.INTERNAL then
      add(lines, "ty", ".", op.name, op, 1)
      if op.args[1] and op.args[1].kind == "tensor" then
        add(lines, "Tensor", ":", op.name, op, 2)
        if op.flags.INPLACE then add(lines, "Tensor", ":", op.name .. "_", op, 2) end
      end
    end
  end
  return table.concat(lines, "\n")
end

--- Writes them to a file.
---@param path string
function meta.write(path) require("tycho.core").io.write_atomic(path, meta.text()) end

return meta
