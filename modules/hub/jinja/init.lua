--- The part of Jinja that chat templates are written in: output, if, for, set, macro, expressions with filters and
-- tests. A template comes from outside: it can only compute text, with what tycho.hub.jinja.budget allows.
--
--     local render = jinja.compile(template)
--     local text = render { messages = { { role = "user", content = "Hello" } }, add_generation_prompt = true }
local budget = require "tycho.hub.jinja.budget"
local expressions = require "tycho.hub.jinja.expression"
local values = require "tycho.hub.jinja.values"

local fail, accept, expect, name_of, whole = expressions.fail, expressions.accept, expressions.expect,
  expressions.name_of, expressions.whole

local M = {}

local RANGE_MOST = 100000
local ROUND = 32 -- entries of what a round of a loop and a call of a macro hold, which a template can keep

-- ---- pieces: text, {{ }}, {% %}; comments are gone, white space is cut as transformers sets Jinja up ----

local function pieces(source)
  source = source:gsub("\r\n", "\n"):gsub("\n$", "")
  local list, at, line, cut = {}, 1, 1, false
  while true do
    local from = source:find("{[{%%#]", at)
    local text = source:sub(at, (from or 0) - 1)
    if not from then text = source:sub(at) end
    local lines = select(2, text:gsub("\n", ""))
    local kind, mark = from and source:sub(from + 1, from + 1), from and source:sub(from + 2, from + 2)
    if cut == "all" then text = text:gsub("^%s+", "") elseif cut == "line" then text = text:gsub("^\n", "") end
    if mark == "-" then
      text = text:sub(1, -#text:reverse():match "^%s*" - 1) -- "%s+$" takes the square of the time
    elseif from and kind ~= "{" and mark ~= "+" then
      -- White space before a block goes when it is all of its line.
      local head = text:match "^(.*\n)[ \t]*$" or (text:match "^[ \t]*$" and (at == 1 or cut == "line") and "")
      text = head or text
    end
    if text ~= "" then list[#list + 1] = { kind = "text", text = text, line = line } end
    line = line + lines
    if not from then return list end
    local close = kind == "{" and "}}" or kind == "%" and "%}" or "#}"
    local inner = from + 2
    if mark == "-" or mark == "+" then inner = inner + 1 end
    -- Quoted text may hold what looks like the end.
    local stop, i = nil, inner
    while i <= #source do
      local c = source:sub(i, i)
      if source:sub(i, i + 1) == close then stop = i break end
      if kind ~= "#" and (c == "'" or c == '"') then
        local j = i + 1
        while j <= #source and source:sub(j, j) ~= c do j = j + (source:sub(j, j) == "\\" and 2 or 1) end
        i = j
      end
      i = i + 1
    end
    if not stop then fail({ line = line }, "'{%s' has no end", kind) end
    local body = source:sub(inner, stop - 1)
    local minus = body:sub(-1) == "-"
    if minus then body = body:sub(1, -2) end
    cut = minus and "all" or kind ~= "{" and "line"
    if kind ~= "#" then list[#list + 1] = { kind = kind, text = body, line = line } end
    line = line + select(2, body:gsub("\n", ""))
    at = stop + 2
  end
end

-- ---- statements become functions that write to env.out ----

local BREAK, CONTINUE = "break", "continue"

local function put(env, text)
  budget.text(#text)
  env.out[#env.out + 1] = text
end

-- Runs statements; a result is BREAK or CONTINUE on its way to the loop.
local function run(body, env)
  for _, statement in ipairs(body) do
    budget.step()
    local signal = statement(env)
    if signal then return signal end
  end
end

local function captured(body, env, vars)
  local inner = { vars = vars or env.vars, out = {}, calls = env.calls }
  run(body, inner)
  return values.concat(inner.out)
end

local function inherit(vars) return setmetatable({}, { __index = vars }) end

local block

-- The statements up to one of the tags; returns the words of that tag as well.
local statements = {}

local function parse_set(state, w)
  local names = {}
  repeat names[#names + 1] = name_of(w) until not accept(w, ",")
  local field = #names == 1 and accept(w, ".") and name_of(w)
  if accept(w, "=") then
    local value = whole(w)
    return function(env)
      local v = value(env)
      if field then
        local target = env.vars[names[1]]
        if not values.is_map(target) and type(target) ~= "table" then fail(w, "'%s' has no fields", names[1]) end
        target[field] = v
      elseif #names == 1 then
        env.vars[names[1]] = v
      else
        for i, name in ipairs(names) do env.vars[name] = values.index(v, i - 1) end
      end
    end
  end
  local body = block(state, w, { endset = true })
  return function(env) env.vars[names[1]] = captured(body, env) end
end
statements.set = parse_set

statements["if"] = function(state, w)
  local cases, otherwise = {}, nil
  local condition = whole(w)
  while true do
    local body, stop = block(state, w, { ["elif"] = true, ["else"] = true, ["endif"] = true })
    if condition then cases[#cases + 1] = { condition, body } else otherwise = body end
    if stop.tag == "endif" then break end
    condition = stop.tag == "elif" and whole(stop) or nil
    if otherwise then fail(stop, "'%s' after else", stop.tag) end
  end
  return function(env)
    for _, case in ipairs(cases) do
      if values.truth(case[1](env)) then return run(case[2], env) end
    end
    if otherwise then return run(otherwise, env) end
  end
end

local function loop_state(items, i)
  return { index = i, index0 = i - 1, first = i == 1, last = i == #items, length = #items,
    revindex = #items - i + 1, revindex0 = #items - i, previtem = items[i - 1], nextitem = items[i + 1] }
end

statements["for"] = function(state, w)
  local names = {}
  repeat names[#names + 1] = name_of(w) until not accept(w, ",")
  expect(w, "in")
  local over = expressions.disjunction(w)
  local condition = accept(w, "if") and expressions.expression(w)
  if w[w.at] then fail(w, "unexpected '%s'", tostring(w[w.at][2])) end
  local otherwise
  local body, stop = block(state, w, { ["else"] = true, ["endfor"] = true })
  if stop.tag == "else" then otherwise = block(state, w, { ["endfor"] = true }) end
  local function bind(vars, item)
    if #names == 1 then
      vars[names[1]] = item
    else
      for i, name in ipairs(names) do vars[name] = values.index(item, i - 1) end
    end
  end
  return function(env)
    local outer, items = env.vars, values.items(over(env))
    if condition then
      local kept = values.list {}
      for _, item in ipairs(items) do
        env.vars = inherit(outer)
        bind(env.vars, item)
        budget.list(1)
        if values.truth(condition(env)) then kept[#kept + 1] = item end
      end
      items = kept
    end
    for i, item in ipairs(items) do
      budget.list(ROUND)
      env.vars = inherit(outer)
      bind(env.vars, item)
      env.vars.loop = loop_state(items, i)
      if run(body, env) == BREAK then break end
    end
    env.vars = outer
    if #items == 0 and otherwise then return run(otherwise, env) end
  end
end

function statements.macro(state, w)
  local name, parameters = name_of(w), {}
  expect(w, "(")
  while not accept(w, ")") do
    local parameter = { name = name_of(w) }
    if accept(w, "=") then parameter.default = expressions.expression(w) end
    parameters[#parameters + 1] = parameter
    if not expressions.peek(w, ")") then expect(w, ",") end
  end
  local body = block(state, w, { endmacro = true })
  return function(env)
    local home = env.vars
    home[name] = function(...)
      local given, named = table.pack(...), nil
      local final = given[given.n]
      if type(final) == "table" and getmetatable(final) == expressions.Named then
        named, given.n = final, given.n - 1
      end
      budget.list(ROUND)
      env.calls.depth = env.calls.depth + 1
      if env.calls.depth > expressions.DEPTH_MOST then fail(w, "macros call each other too deep") end
      local vars = inherit(home)
      for i, parameter in ipairs(parameters) do
        local value = i <= given.n and given[i] or named and named[parameter.name]
        if value == nil and parameter.default then value = parameter.default(env) end
        vars[parameter.name] = value
      end
      local text = captured(body, env, vars)
      env.calls.depth = env.calls.depth - 1
      return text
    end
  end
end

-- Transformers' mark of what the assistant said: its text.
function statements.generation(state, w)
  local body = block(state, w, { endgeneration = true })
  return function(env) return run(body, env) end
end

statements["break"] = function() return function() return BREAK end end
statements["continue"] = function() return function() return CONTINUE end end

function block(state, opened, ends)
  local body = {}
  state.depth = state.depth + 1
  if state.depth > expressions.DEPTH_MOST then fail(opened, "blocks are nested too deep") end
  while true do
    local piece = state.list[state.at]
    if not piece then
      if not ends then return body end
      fail(opened, "a block has no end")
    end
    state.at = state.at + 1
    if piece.kind == "text" then
      body[#body + 1] = function(env) put(env, piece.text) end
    else
      local w = expressions.words(piece)
      if piece.kind == "{" then
        local value = whole(w)
        body[#body + 1] = function(env) put(env, values.text(value(env))) end
      else
        w.tag = name_of(w)
        if ends and ends[w.tag] then
          state.depth = state.depth - 1
          return body, w
        end
        local make = statements[w.tag] or fail(w, "no statement '%s'", w.tag)
        body[#body + 1] = make(state, w)
      end
    end
  end
end

-- What templates may call.
local functions = {
  range = function(first, last, step)
    if last == nil then first, last = 0, first end
    step = step or 1
    for _, part in ipairs { first or "", last, step } do
      if math.type(part) ~= "integer" then error("range: expected integers", 0) end
    end
    if step == 0 then error("range: a step of 0", 0) end
    local count = math.max(0.0, (last - (first + 0.0)) / step) -- floats do not overflow
    if count > RANGE_MOST then error(("range: at most %d integers"):format(RANGE_MOST), 0) end
    local result = values.list {}
    local n = math.max(0, (last - first + step - (step > 0 and 1 or -1)) // step)
    budget.list(n)
    for i = 1, n do result[i] = first + (i - 1) * step end
    return result
  end,
  namespace = function(named)
    local result = {}
    budget.list(0)
    for key, value in pairs(type(named) == "table" and named or {}) do
      budget.list(1)
      result[key] = value
    end
    return result
  end,
  raise_exception = function(message) error("the template says: " .. values.text(message), 0) end,
  strftime_now = function(format)
    if type(format) ~= "string" then error("strftime_now: expected a format", 0) end
    budget.text(16 * #format)
    local ok, text = pcall(os.date, format)
    return ok and text or error("strftime_now: no such format", 0)
  end,
}
functions.dict = functions.namespace

--- A function of a table of variables that renders the template. Errors name the line.
---@param template string
---@return fun(variables: table): string
function M.compile(template)
  local state = { list = pieces(template), at = 1, depth = 0 }
  local body = block(state, { line = 1 })
  return function(variables)
    local vars = setmetatable({}, { __index = functions })
    for key, value in pairs(variables or {}) do vars[key] = value end
    return budget.run(captured, body, { vars = inherit(vars), calls = { depth = 0 } })
  end
end

return M
