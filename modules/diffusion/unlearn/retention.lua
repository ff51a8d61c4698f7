--- Unlearning accuracy and the two retentions of the benchmark. Zhang et al. 2024, "UnlearnCanvas", section 3.
local arguments = require "tycho.arguments"

--- Three of the benchmark's metrics of pictures that were judged: forgetting (of pictures that were asked for with the
-- concept, the share that do not show it), in_domain (of the others, the share that show what was asked for in the
-- concept's domain) and cross_domain (in the other domain). wanted, seen: i64 [n], numbers that pictures were asked to
-- show and that a judge sees, by domain; concept: its number in `domain`.
---@param wanted table<string, Tensor>
---@param seen table<string, Tensor>
---@param domain string   such as "style"
---@param other string    the other domain, such as "kind"
---@param concept integer
---@return { forgetting: number, in_domain: number, cross_domain: number }
return function(wanted, seen, domain, other, concept)
  local who = "unlearn.retention"
  for name, list in pairs { wanted = wanted, seen = seen } do
    arguments.expect(who, name, list, "a table")
    arguments.expect(who, name .. "." .. tostring(domain), list[domain], "a tensor")
    arguments.expect(who, name .. "." .. tostring(other), list[other], "a tensor")
  end
  arguments.expect(who, "concept", concept, "an integer")
  local asked = wanted[domain]:eq(concept)
  local many, rest = asked:to("f64"):sum():item(), asked:logical_not():to("f64"):sum():item()
  if many == 0 or rest == 0 then
    arguments.fail("%s: wanted.%s: expected pictures with %d and without, got %d and %d", who, domain, concept, many,
      rest)
  end
  local function share(of, right, count) return of:logical_and(right):to("f64"):sum():item() / count end
  local others = asked:logical_not()
  return { forgetting = share(asked, seen[domain]:ne(concept), many),
    in_domain = share(others, seen[domain]:eq(wanted[domain]), rest),
    cross_domain = share(others, seen[other]:eq(wanted[other]), rest) }
end
