--- Expressions of chat templates: words, then functions of the variables. See tycho.hub.jinja.
local budget = require "tycho.hub.jinja.budget"
local values = require "tycho.hub.jinja.values"

local M = { DEPTH_MOST = 100 }

M.Named = {} -- the metatable of named arguments, which come last

local function fail(at, format, ...)
  error(("template, line %d: %s"):format(at.line, format:format(...)), 0)
end

-- ---- words of an expression ----

local unescaped = { n = "\n", t = "\t", r = "\r", ["\\"] = "\\", ["'"] = "'", ['"'] = '"' }
local long = { ["=="] = true, ["!="] = true, ["<="] = true, [">="] = true, ["//"] = true, ["**"] = true }

local function words(piece)
  local list, at, text = { line = piece.line, at = 1 }, 1, piece.text
  while true do
    at = text:find("%S", at)
    if not at then return list end
    local c = text:sub(at, at)
    local word
    if c:find "[%a_]" then
      word = text:match("^[%w_]+", at)
      list[#list + 1] = { "name", word }
    elseif c:find "%d" then
      word = text:match("^%d+%.%d+", at) or text:match("^%d+", at)
      list[#list + 1] = { "value", tonumber(word) }
    elseif c == "'" or c == '"' then
      local stop = at + 1
      while stop <= #text and text:sub(stop, stop) ~= c do
        stop = stop + (text:sub(stop, stop) == "\\" and 2 or 1)
      end
      if stop > #text then fail(piece, "a text has no end") end
      word = text:sub(at, stop)
      list[#list + 1] = { "value", (word:sub(2, -2):gsub("\\(.)", function(e) return unescaped[e] or "\\" .. e end)) }
    else
      word = long[text:sub(at, at + 1)] and text:sub(at, at + 1) or c
      if not word:find "^[%[%]%(%){}=<>!+%-*/%%~|.,:]" or word == "!" then fail(piece, "unexpected '%s'", word) end
      list[#list + 1] = { "sign", word }
    end
    at = at + #word
  end
end

-- ---- expressions become functions of the variables ----

local expression

local function peek(w, word)
  local next = w[w.at]
  return next ~= nil and next[1] ~= "value" and next[2] == word
end

local function accept(w, word)
  if not peek(w, word) then return false end
  w.at = w.at + 1
  return true
end

local function expect(w, word)
  if not accept(w, word) then
    fail(w, "expected '%s'%s", word, w[w.at] and ", got '" .. tostring(w[w.at][2]) .. "'" or "")
  end
end

local function name_of(w)
  local next = w[w.at]
  if not next or next[1] ~= "name" then fail(w, "expected a name") end
  w.at = w.at + 1
  return next[2]
end

-- (a, b, name=c): functions of the positional arguments and of the named ones.
local function arguments(w, close)
  local list, named = {}, nil
  while not accept(w, close) do
    if w[w.at] and w[w.at][1] == "name" and w[w.at + 1] and w[w.at + 1][1] == "sign" and w[w.at + 1][2] == "=" then
      local name = name_of(w)
      expect(w, "=")
      named = named or {}
      named[name] = expression(w)
    else
      list[#list + 1] = expression(w)
    end
    if not peek(w, close) then expect(w, ",") end
  end
  return function(env)
    local result, count = {}, #list
    budget.step()
    for i, one in ipairs(list) do result[i] = one(env) end
    if named then
      count = count + 1
      result[count] = setmetatable({}, M.Named)
      for name, one in pairs(named) do result[count][name] = one(env) end
    end
    return result, count
  end
end

local constants = { ["true"] = true, ["True"] = true, ["false"] = false, ["False"] = false, none = values.none,
  None = values.none }

local function literal_list(items, env)
  local list = values.list {}
  budget.list(#items)
  for i, item in ipairs(items) do list[i] = item(env) end
  return list
end

local function primary(w)
  local next = w[w.at]
  if not next then fail(w, "expected an expression, got the end") end
  w.at = w.at + 1
  if next[1] == "value" then
    local value = next[2]
    while type(value) == "string" and w[w.at] and w[w.at][1] == "value" and type(w[w.at][2]) == "string" do
      value = value .. w[w.at][2]
      w.at = w.at + 1
    end
    return function() return value end
  end
  if next[1] == "name" then
    local name = next[2]
    if constants[name] ~= nil then return function() return constants[name] end end
    return function(env) return env.vars[name] end
  end
  if next[2] == "(" then
    local items = {}
    if not peek(w, ")") then
      repeat items[#items + 1] = expression(w) until not accept(w, ",") or peek(w, ")")
    end
    local single = #items == 1 and w[w.at - 1][2] ~= ","
    expect(w, ")")
    if single then return items[1] end
    return function(env) return literal_list(items, env) end
  end
  if next[2] == "[" then
    local items = {}
    while not accept(w, "]") do
      items[#items + 1] = expression(w)
      if not peek(w, "]") then expect(w, ",") end
    end
    return function(env) return literal_list(items, env) end
  end
  if next[2] == "{" then
    local keys, items = {}, {}
    while not accept(w, "}") do
      keys[#keys + 1] = expression(w)
      expect(w, ":")
      items[#items + 1] = expression(w)
      if not peek(w, "}") then expect(w, ",") end
    end
    return function(env)
      local map = {}
      budget.list(#keys)
      for i, key in ipairs(keys) do map[key(env)] = items[i](env) end
      return map
    end
  end
  fail(w, "unexpected '%s'", next[2])
end

local function subscript(w, of)
  local first, last, step
  local slice = false
  if not peek(w, ":") then first = expression(w) end
  if accept(w, ":") then
    slice = true
    if not peek(w, "]") and not peek(w, ":") then last = expression(w) end
    if accept(w, ":") and not peek(w, "]") then step = expression(w) end
  end
  expect(w, "]")
  if not slice then return function(env) return values.index(of(env), first(env)) end end
  return function(env)
    return values.slice(of(env), first and first(env), last and last(env), step and step(env))
  end
end

local function call_method(w, of, name)
  local args = arguments(w, ")")
  return function(env)
    local v = of(env)
    local method = type(v) == "string" and values.text_methods[name]
      or type(v) == "table" and (type(v[name]) == "function" and function(_, ...) return v[name](...) end
        or values.map_methods[name])
    if not method then fail(w, "no method '%s' here", name) end
    local list, count = args(env)
    return method(v, table.unpack(list, 1, count))
  end
end

local function postfix(w)
  local node = primary(w)
  while true do
    local of = node
    if accept(w, ".") then
      local name = name_of(w)
      if accept(w, "(") then
        node = call_method(w, of, name)
      else
        node = function(env) return values.index(of(env), name) end
      end
    elseif accept(w, "[") then
      node = subscript(w, of)
    elseif accept(w, "(") then
      local args = arguments(w, ")")
      node = function(env)
        local fn = of(env)
        if type(fn) ~= "function" then fail(w, "what is called is no function") end
        local list, count = args(env)
        return fn(table.unpack(list, 1, count))
      end
    elseif accept(w, "|") then
      local name = name_of(w)
      local filter = values.filters[name] or fail(w, "no filter '%s'", name)
      local args = accept(w, "(") and arguments(w, ")")
      node = function(env)
        if not args then return filter(of(env)) end
        local list, count = args(env)
        return filter(of(env), table.unpack(list, 1, count))
      end
    elseif accept(w, "is") then
      local negated = accept(w, "not")
      local name = name_of(w)
      local test = values.tests[name] or fail(w, "no test '%s'", name)
      local argument
      if accept(w, "(") then
        argument = arguments(w, ")")
      elseif w[w.at] and (w[w.at][1] == "value" or name == "in" or name == "equalto") then
        local one = postfix(w)
        argument = function(env) return { one(env) }, 1 end
      end
      node = function(env)
        local list, count = {}, 0
        if argument then list, count = argument(env) end
        return test(of(env), table.unpack(list, 1, count)) ~= negated
      end
    else
      return node
    end
  end
end

local function arithmetic(w, name, a, b)
  budget.step()
  if name == "~" then return values.concat { values.text(a), values.text(b) } end
  if name == "+" and type(a) == "string" and type(b) == "string" then return values.concat { a, b } end
  if name == "+" and values.is_list(a) and values.is_list(b) then
    budget.list(#a + #b)
    local result = values.list(table.move(a, 1, #a, 1, {}))
    return table.move(b, 1, #b, #result + 1, result)
  end
  if name == "*" and type(a) == "string" and math.type(b) == "integer" then
    return values.rep(a, b)
  end
  if type(a) ~= "number" or type(b) ~= "number" then
    local function kind(v) return v == nil and "undefined" or values.is_none(v) and "None" or type(v) end
    fail(w, "%s %s %s cannot be computed", kind(a), name, kind(b))
  end
  if (name == "//" or name == "%") and b == 0 then fail(w, "division by 0") end
  if name == "+" then return a + b elseif name == "-" then return a - b elseif name == "*" then return a * b end
  if name == "/" then return a / b elseif name == "//" then return a // b elseif name == "%" then return a % b end
  local p = a ^ b
  return math.type(a) == "integer" and math.type(b) == "integer" and b >= 0 and math.tointeger(p) or p
end

local function unary(w)
  if accept(w, "-") then
    local of = unary(w)
    return function(env) return -of(env) end
  end
  accept(w, "+")
  return postfix(w)
end

-- Operators of one rank, from the left.
local function ranked(next_rank, signs)
  return function(w)
    local node = next_rank(w)
    while true do
      local name = w[w.at] and w[w.at][1] == "sign" and signs[w[w.at][2]] and w[w.at][2]
      if not name then return node end
      w.at = w.at + 1
      local a, b = node, next_rank(w)
      node = function(env) return arithmetic(w, name, a(env), b(env)) end
    end
  end
end

local power = ranked(unary, { ["**"] = true })
local product = ranked(power, { ["*"] = true, ["/"] = true, ["//"] = true, ["%"] = true })
local joined = ranked(product, { ["~"] = true })
local sum = ranked(joined, { ["+"] = true, ["-"] = true })

local compare = {
  ["=="] = values.equal,
  ["!="] = function(a, b) return not values.equal(a, b) end,
  ["<"] = function(a, b) return a < b end, ["<="] = function(a, b) return a <= b end,
  [">"] = function(a, b) return a > b end, [">="] = function(a, b) return a >= b end,
  ["in"] = function(a, b) return values.contains(b, a) end,
  ["not in"] = function(a, b) return not values.contains(b, a) end,
}

local function comparison(w)
  local first, rest = sum(w), {}
  while true do
    local next = w[w.at]
    local name = next and next[1] ~= "value" and next[2]
    if name == "not" and w[w.at + 1] and w[w.at + 1][2] == "in" then
      w.at, name = w.at + 1, "not in"
    end
    if not compare[name] then break end
    w.at = w.at + 1
    rest[#rest + 1] = { name, sum(w) }
  end
  if #rest == 0 then return first end
  return function(env)
    local a = first(env)
    for _, step in ipairs(rest) do
      local b = step[2](env)
      if step[1]:find "[<>]" and (type(a) ~= type(b) or (type(a) ~= "number" and type(a) ~= "string")) then
        fail(w, "%s cannot be compared with %s", type(a), type(b))
      end
      if not compare[step[1]](a, b) then return false end
      a = b
    end
    return true
  end
end

local function negation(w)
  if not accept(w, "not") then return comparison(w) end
  local of = negation(w)
  return function(env) return not values.truth(of(env)) end
end

-- `word` between operands: the value of the first that is as `decides` says, else of the last.
local function chain(operand, word, decides)
  return function(w)
    local node = operand(w)
    while accept(w, word) do
      local a, b = node, operand(w)
      node = function(env)
        local v = a(env)
        if values.truth(v) == decides then return v end
        return b(env)
      end
    end
    return node
  end
end

local conjunction = chain(negation, "and", false)
local disjunction = chain(conjunction, "or", true)

function expression(w)
  w.depth = (w.depth or 0) + 1
  if w.depth > M.DEPTH_MOST then fail(w, "an expression is nested more than %d deep", M.DEPTH_MOST) end
  local node = disjunction(w)
  while accept(w, "if") do
    local yes, condition, no = node, disjunction(w), nil
    if accept(w, "else") then no = expression(w) end
    node = function(env)
      if values.truth(condition(env)) then return yes(env) end
      return no and no(env)
    end
  end
  w.depth = w.depth - 1
  return node
end

-- A whole expression: nothing may follow it.
local function whole(w)
  local node = expression(w)
  if w[w.at] then fail(w, "unexpected '%s'", tostring(w[w.at][2])) end
  return node
end

M.fail, M.words, M.accept, M.peek, M.expect, M.name_of = fail, words, accept, peek, expect, name_of
M.expression, M.whole, M.disjunction = expression, whole, disjunction

return M
