--- Checks of arguments. A wrong one is an error that reads "FUNCTION: ARGUMENT: expected X, got Y" and points at the
-- line of the program that called into the library, however many of its functions lie between.
--
-- What is expected is written once, as the words of the error, and read as the condition:
--
--     arguments.expect("clip_grad_norm", "max_norm", value, "a number >= 0")
--
-- Words: "a number", "an integer", "a finite number", each perhaps with ">= 0", "> 0", "<= 1" or "in [0, 1)";
-- "a tensor", "a module", "a function" (or what can be called), "a string", "a boolean", "a table", "a list", "nil";
-- "a pair of integers" and "a list of ..." with the plural of the others; "x" in quotes: that very text, 8: that very
-- number.
-- Alternatives are joined by " or ".
local M = {}

-- ---- where the error is ----

-- The sources of the library: this file's folder, and in the source tree modules/ beside lua/.
local folder = debug.getinfo(1, "S").source:match "^(@.*[/\\])arguments%.lua$" or "@tycho/"
local modules = folder:match "^(.*)lua[/\\]tycho[/\\]$"
modules = modules and modules .. "modules/"

local function is_ours(source)
  return source:sub(1, #folder) == folder or modules and source:sub(1, #modules) == modules
end

--- "file:line: " of the innermost line that is no line of the library; "" where there is none.
function M.where()
  for level = 2, 200 do
    local info = debug.getinfo(level, "Sl")
    if not info then break end
    if info.currentline > 0 and not is_ours(info.source) then
      return ("%s:%d: "):format(info.short_src, info.currentline)
    end
  end
  return ""
end

--- Raises a text, formatted, at the line of the program that called into the library.
function M.fail(text, ...)
  if select("#", ...) > 0 then text = text:format(...) end
  error(M.where() .. text, 0)
end

-- Whatever prints an error object that has __tostring prints that alone, as the programs tycho and lua do.
local Refusal = { __tostring = function(self) return self.text end }

--- Raises a text for whoever runs a program, where its lines are not at fault: it is printed without a traceback.
function M.refuse(text, ...) error(setmetatable({ text = text:format(...) }, Refusal), 0) end

-- A text without the line of the library that it begins with, as errors of ops that the library called have it. Places
-- that are long begin with dots instead of a folder.
local function without_our_line(text)
  local source, rest = text:match "^([^\n]-%.lua):%d+: (.*)$"
  if source and (is_ours("@" .. source) or source:find "^%.%.%..*tycho/") then return rest end
  return text
end

--- Whether an error that pcall caught is Ctrl-C, which whoever caught it passes on.
---@param problem any
---@return boolean
function M.interrupted(problem) return tostring(problem):find("interrupted", 1, true) ~= nil end

--- Raises an error that pcall caught at the line of the program that called into the library, unless it says where it
-- is already; `prefix` comes before its text.
---@param problem any
---@param prefix? string
function M.raise(problem, prefix)
  if type(problem) ~= "string" then error(problem, 0) end
  local here = M.where()
  if problem:sub(1, #here) == here then problem = problem:sub(#here + 1) else problem = without_our_line(problem) end
  error(here .. (prefix or "") .. problem, 0)
end

-- ---- what came ----

local function is_tensor(value) return require("tycho.core").is_tensor(value) end

local function is_module(value)
  local class = type(value) == "table" and getmetatable(value)
  return type(class) == "table" and rawget(class, "__index") == class and class._is_module == true
end

--- Whether a value is a module: an object, not a class.
M.is_module = is_module

local function is_callable(value)
  local meta = type(value) ~= "function" and getmetatable(value)
  return type(value) == "function" or type(meta) == "table" and meta.__call ~= nil
end

--- Whether a value can be called.
M.is_callable = is_callable

--- A value as errors show it: numbers and short texts themselves, of others what they are.
---@return string
function M.describe(value)
  local kind = type(value)
  if kind == "string" then
    local short = #value > 40 and value:sub(1, 40) .. "..." or value
    return '"' .. short:gsub("[%c\"\\\x80-\xff]", function(c) return ("\\x%02x"):format(c:byte()) end) .. '"'
  elseif kind == "number" or kind == "boolean" or kind == "nil" then
    return value ~= value and "nan" or tostring(value)
  elseif is_tensor(value) then
    local ok, shape = pcall(function() return table.concat(value.shape, ", ") end)
    return ok and ("a tensor [%s]"):format(shape) or "a released tensor"
  elseif is_module(value) then
    return "a module " .. tostring(getmetatable(value).__name)
  elseif kind == "table" and rawget(value, "__index") == value and value._is_module then
    return ("the class %s, which is called to make a module"):format(tostring(value.__name))
  elseif kind == "table" then
    return next(value) == nil and "an empty table" or "a table"
  end
  return "a " .. kind
end

-- ---- what is expected ----

local function yes() return true end

local compiled

-- A range as a function, from its words; nil where they are none.
local function range(words)
  if words == "" then return yes end
  local sign, bound = words:match "^([<>]=?) (%S+)$"
  bound = tonumber(bound)
  if bound then
    if sign == ">=" then return function(x) return x >= bound end end
    if sign == ">" then return function(x) return x > bound end end
    if sign == "<=" then return function(x) return x <= bound end end
    return function(x) return x < bound end
  end
  local left, low, high, right = words:match "^in ([%[%(])(%S+), (%S+)([%]%)])$"
  low, high = tonumber(low), tonumber(high)
  if not high then return nil end
  return function(x)
    return (x > low or left == "[" and x == low) and (x < high or right == "]" and x == high)
  end
end

-- By the noun: a test of the kind, to which numbers add a range.
local nouns = {
  number = function(v) return type(v) == "number" end,
  ["finite number"] = function(v) return type(v) == "number" and v == v and v ~= math.huge and v ~= -math.huge end,
  integer = function(v) return type(v) == "number" and math.tointeger(v) ~= nil end,
  tensor = is_tensor,
  module = is_module,
  ["function"] = is_callable,
  string = function(v) return type(v) == "string" end,
  boolean = function(v) return type(v) == "boolean" end,
  table = function(v) return type(v) == "table" end,
  list = function(v) return type(v) == "table" and not is_module(v) and rawget(v, "__index") ~= v end, -- no class
}

-- A test of every element of a list (of `count` elements), by a word in the plural with its range.
local function elements(words, count)
  local test = compiled["a " .. words:gsub("s%f[%A]", "", 1)]
  return function(v)
    if not nouns.list(v) or count and #v ~= count then return false end
    for i = 1, #v do
      if not test(v[i]) then return false, ("%s as element %d"):format(M.describe(v[i]), i) end
    end
    return true
  end
end

local function alternative(words)
  if words == "nil" then return function(v) return v == nil end end
  local literal = words:match '^"(.*)"$' or tonumber(words)
  if literal then return function(v) return v == literal end end
  local phrase = words:match "^an? (.+)$"
  local of = phrase and phrase:match "^list of (.+)$"
  if of then return elements(of) end
  of = phrase and phrase:match "^pair of (.+)$"
  if of then return elements(of, 2) end
  for noun, test in pairs(nouns) do
    if phrase and phrase:sub(1, #noun) == noun then
      local inside = range((phrase:sub(#noun + 1):gsub("^ ", "")))
      if inside == yes then return test end
      if inside then return function(v) return test(v) and inside(v) end end
    end
  end
  error(("arguments: no such kind: %s"):format(words), 0)
end

-- The test of a kind: whether a value is one, and perhaps what is wrong in a list. Made when it is first wanted.
compiled = setmetatable({}, {
  __index = function(self, kind)
    local tests = {}
    for words in (kind .. " or "):gmatch "(.-) or " do tests[#tests + 1] = alternative(words) end
    local test = tests[1]
    if #tests > 1 then
      test = function(v)
        local detail
        for i = 1, #tests do
          local ok, why = tests[i](v)
          if ok then return true end
          detail = detail or why
        end
        return false, detail
      end
    end
    self[kind] = test
    return test
  end,
})

--- `value`, or an error when it is not of the kind.
---@param who string the function, as the error names it
---@param what string the argument
---@param value any
---@param kind string what is expected, in the words that the top of this file lists
---@return any value
function M.expect(who, what, value, kind)
  local ok, detail = compiled[kind](value)
  if ok then return value end
  return M.fail("%s: %s: expected %s, got %s", who, what, kind, detail or M.describe(value))
end

-- ---- options ----

--- A default that stands for "not set".
M.none = {}

-- What PyTorch calls options that are called otherwise here.
local also = { dim_feedforward = "feedforward", num_encoder_layers = "encoder_layers",
  num_decoder_layers = "decoder_layers", max_iter = "iterations", max_eval = "evaluations", history_size = "history",
  line_search_fn = "line_search", num_workers = "workers", dim = "dims", dims = "dim",
  scale_factor = "scale", padding_idx = "padding_index" }

-- Two numbers that PyTorch gives in one.
local function split_betas(who, given)
  local list, copy = given.betas, {}
  if type(list) ~= "table" or type(list[1]) ~= "number" or type(list[2]) ~= "number" then
    M.fail("%s: betas: expected a list of two numbers, got %s", who, M.describe(list))
  end
  for key, value in pairs(given) do copy[key] = value end
  copy.betas, copy.beta1, copy.beta2 = nil, list[1], list[2]
  return copy
end

local by_type = { number = "a number", string = "a string", boolean = "a boolean", table = "a table",
  ["function"] = "a function" }

--- A table with the defaults and what `given` overrides. Raises on names that `defaults` lacks, and on values that are
-- not of their kind: what `kinds` says of a name (false: anything), else the type of the default.
---@param who string the function, as errors name it
---@param given? table
---@param defaults table<string, any> arguments.none: not set
---@param kinds? table<string, string|false> as arguments.expect takes them
---@return table
function M.read(who, given, defaults, kinds)
  local result = {}
  for key, value in pairs(defaults) do
    if value ~= M.none then result[key] = value end
  end
  if given == nil then return result end
  if type(given) ~= "table" or is_module(given) then
    M.fail("%s: options: expected a table, got %s", who, M.describe(given))
  end
  if given.betas ~= nil and defaults.betas == nil and defaults.beta1 ~= nil and defaults.beta2 ~= nil then
    given = split_betas(who, given)
  end
  for key, value in pairs(given) do
    if defaults[key] == nil and also[key] and given[also[key]] == nil then key = also[key] end
    local default = defaults[key]
    if default == nil then
      local names = {}
      for name in pairs(defaults) do names[#names + 1] = tostring(name) end
      table.sort(names)
      M.fail("%s: no option '%s'; there are: %s", who, tostring(key), table.concat(names, ", "))
    end
    local kind = kinds and kinds[key]
    if kind == nil and default ~= M.none then kind = by_type[type(default)] end
    if kind then M.expect(who, key, value, kind) end
    result[key] = value
  end
  return result
end

return M
